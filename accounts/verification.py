"""Proof that an address is its user's: a single-use link in a mail.

The token exists in the mail alone. The outbox holds the user's id, the link is made when the mail
is sent, and the table keeps its hash.
"""

import hashlib
import secrets
from typing import Any, cast

from sqlalchemy import CursorResult, delete, update
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.errors import InvalidToken
from accounts.mail import Mailer
from accounts.models import EmailToken, User
from accounts.settings import AccountsSettings
from common import outbox
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Sessions

TOPIC = "verification_mail"
PURPOSE = "verify_email"
RESEND_EVERY_S = 300
"""One mail to one address in so long a time, however often it is asked for."""
MAX_TOKEN_LENGTH = 100

SUBJECT = "Confirm your e-mail address"
BODY = """Open this link to confirm your address and receive your free credit:

{link}

It works once, within {minutes} minutes. If you did not sign up, ignore this mail.
"""


async def request(session: AsyncSession, user: User, *, clock: Clock = utc_now_us) -> bool:
    """Promise the mail, in the caller's transaction; False when one has just been promised."""
    period = clock() // (RESEND_EVERY_S * MICROSECONDS_PER_SECOND)
    return await outbox.promise(
        session,
        topic=TOPIC,
        key=f"{TOPIC}:{user.id}:{period}",
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
    token = secrets.token_urlsafe(32)
    async with sessions.begin() as session:
        user = await session.get_one(User, payload["user_id"])
        if user.email_verified_at is not None:
            return
        session.add(
            EmailToken(
                token_hash=_hash(token),
                user_id=user.id,
                email=user.email,
                purpose=PURPOSE,
                created_at=clock(),
                expires_at=clock() + settings.email_token_ttl_s * MICROSECONDS_PER_SECOND,
            )
        )
    link = f"{settings.public_base_url.rstrip('/')}/verify?token={token}"
    body = BODY.format(link=link, minutes=settings.email_token_ttl_s // 60)
    await mailer.send(to=user.email, subject=SUBJECT, body=body)


async def redeem(session: AsyncSession, token: str, *, clock: Clock = utc_now_us) -> User:
    """The user whose address this token proves, now verified; raises InvalidToken.

    One guarded UPDATE decides: of any number of attempts at once, one gets through.
    """
    if len(token) > MAX_TOKEN_LENGTH:
        raise InvalidToken("This link does not work.")
    now_us = clock()
    found = await session.execute(
        update(EmailToken)
        .where(
            EmailToken.token_hash == _hash(token),
            EmailToken.purpose == PURPOSE,
            EmailToken.used_at.is_(None),
            EmailToken.expires_at > now_us,
        )
        .values(used_at=now_us)
        .returning(EmailToken.user_id, EmailToken.email)
        .execution_options(synchronize_session=False)
    )
    row = found.one_or_none()
    user = await session.get(User, row.user_id) if row is not None else None
    # The token proves the address that it was sent to, which may have been changed since.
    if row is None or user is None or user.email != row.email or user.status != "active":
        raise InvalidToken("This link has been used, has expired, or was never valid.")
    if user.email_verified_at is None:
        user.email_verified_at = now_us
        await session.flush()
    return user


async def purge_expired(session: AsyncSession, *, clock: Clock = utc_now_us) -> int:
    """Delete the tokens that can no longer be used; returns how many."""
    result = await session.execute(delete(EmailToken).where(EmailToken.expires_at <= clock()))
    return cast(CursorResult[Any], result).rowcount


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
