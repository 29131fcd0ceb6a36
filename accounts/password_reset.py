"""A new password for whoever reads the account's mail.

Nobody learns from this which addresses have accounts: every address gets the same answer after the
same work, and the outbox finds out later whether there is anybody to write to. A reset ends every
session of the user; API keys are not passwords and go on working.
"""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from accounts import audit, email_tokens, emails, organizations, sessions, users
from accounts.mail import Mailer
from accounts.models import User
from accounts.passwords import PasswordHasher, require_strong
from accounts.settings import AccountsSettings
from common import outbox
from common.clock import Clock, utc_now_us
from common.db import Sessions

TOPIC = "password_reset_mail"

SUBJECT = "Choose a new password"
BODY = """Somebody, we hope you, asked for a new password for this account. Open this link to choose it:

{link}

It works once, within {minutes} minutes, and ends every session of the account. If it was not you,
ignore this mail: your password stays as it is.
"""


async def request(session: AsyncSession, email: str, *, clock: Clock = utc_now_us) -> None:
    """Promise the mail, should the address have an account; raises InvalidEmail.

    An unknown address is promised one too, which is never sent.
    """
    user = await users.find_by_email(session, email)
    await outbox.promise(
        session,
        topic=TOPIC,
        key=email_tokens.mail_key(TOPIC, emails.canonical_hash(email), clock=clock),
        payload={"user_id": None if user is None else user.id},
        clock=clock,
    )


async def deliver(
    sessions: Sessions,
    payload: dict[str, Any],
    *,
    mailer: Mailer,
    settings: AccountsSettings,
    clock: Clock = utc_now_us,
) -> None:
    """The outbox's handler: make a token, commit it, send its link to the account's own address."""
    if payload["user_id"] is None:
        return
    ttl_s = settings.email_token_ttl_s
    async with sessions.begin() as session:
        user = await session.get_one(User, payload["user_id"])
        if user.status != "active":
            return
        token = email_tokens.issue(session, user, "reset_password", ttl_s=ttl_s, clock=clock)
    link = f"{settings.public_base_url.rstrip('/')}/reset?token={token}"
    body = BODY.format(link=link, minutes=ttl_s // 60)
    await mailer.send(to=user.email, subject=SUBJECT, body=body)


async def hash_new(
    session: AsyncSession,
    token: str,
    password: str,
    *,
    hasher: PasswordHasher,
    clock: Clock = utc_now_us,
) -> str:
    """The hash to give to `reset`, for a token that works; raises InvalidToken, WeakPassword.

    It only reads: give it a `read_only` session, so that SQLite's write lock is free while argon2id
    runs. A password that is refused leaves the link as good as it was.
    """
    user = await email_tokens.find(session, token, "reset_password", clock=clock)
    require_strong(password, email=user.email)
    return await hasher.hash(password)


async def reset(
    session: AsyncSession,
    token: str,
    password_hash: str,
    *,
    address: str | None = None,
    clock: Clock = utc_now_us,
) -> None:
    """Use the token up, set the password, and end all sessions and other links of the user.

    Raises InvalidToken: of any number of attempts at once, one gets through.
    """
    user = await email_tokens.redeem(session, token, "reset_password", clock=clock)
    user.password_hash = password_hash
    await sessions.end_all(session, user.id)
    await email_tokens.revoke_all(session, user.id, "reset_password")
    first, *_ = await organizations.organizations_of(session, user.id)
    await audit.record(
        session,
        "user.reset_password",
        organization_id=first.id,
        user_id=user.id,
        target=user.id,
        address=address,
        clock=clock,
    )
