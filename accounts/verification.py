"""Proof that an address is its user's: a single-use link in a mail."""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from accounts import email_tokens
from accounts.mail import Mailer
from accounts.models import User
from accounts.settings import AccountsSettings
from common import outbox
from common.clock import Clock, utc_now_us
from common.db import Sessions

TOPIC = "verification_mail"

SUBJECT = "Confirm your e-mail address"
BODY = """Open this link to confirm your address and receive your free credit:

{link}

It works once, within {minutes} minutes. If you did not sign up, ignore this mail.
"""


async def request(session: AsyncSession, user: User, *, clock: Clock = utc_now_us) -> bool:
    """Promise the mail, in the caller's transaction; False when one has just been promised."""
    return await outbox.promise(
        session,
        topic=TOPIC,
        key=email_tokens.mail_key(TOPIC, user.id, clock=clock),
        payload={"user_id": user.id},
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
    """The outbox's handler: make a token, commit it, send its link."""
    ttl_s = settings.email_token_ttl_s
    async with sessions.begin() as session:
        user = await session.get_one(User, payload["user_id"])
        if user.email_verified_at is not None:
            return
        token = email_tokens.issue(session, user, "verify_email", ttl_s=ttl_s, clock=clock)
    link = f"{settings.public_base_url.rstrip('/')}/verify?token={token}"
    body = BODY.format(link=link, minutes=ttl_s // 60)
    await mailer.send(to=user.email, subject=SUBJECT, body=body)


async def redeem(session: AsyncSession, token: str, *, clock: Clock = utc_now_us) -> User:
    """The user whose address this token proves, now verified; raises InvalidToken."""
    user = await email_tokens.redeem(session, token, "verify_email", clock=clock)
    if user.email_verified_at is None:
        user.email_verified_at = clock()
        await session.flush()
    return user
