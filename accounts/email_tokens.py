"""Single-use secrets that are sent to an address: the link of a mail.

The token exists in the mail alone. It is made when the mail is sent, and the table keeps its hash.
"""

import hashlib
import secrets
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, CursorResult, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.errors import InvalidToken
from accounts.models import EmailToken, User
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us

Purpose = Literal["verify_email", "reset_password"]
RESEND_EVERY_S = 300
"""One mail of a purpose to one address in so long a time, however often it is asked for."""
MAX_LENGTH = 100


def mail_key(topic: str, subject: str, *, clock: Clock) -> str:
    """The outbox's name of one mail: the same for all that are asked for within the period."""
    return f"{topic}:{subject}:{clock() // (RESEND_EVERY_S * MICROSECONDS_PER_SECOND)}"


def issue(
    session: AsyncSession, user: User, purpose: Purpose, *, ttl_s: int, clock: Clock = utc_now_us
) -> str:
    """A new token for the user's present address; it works once, for `ttl_s` seconds."""
    token = secrets.token_urlsafe(32)
    now_us = clock()
    session.add(
        EmailToken(
            token_hash=_hash(token),
            user_id=user.id,
            email=user.email,
            purpose=purpose,
            created_at=now_us,
            expires_at=now_us + ttl_s * MICROSECONDS_PER_SECOND,
        )
    )
    return token


async def find(
    session: AsyncSession, token: str, purpose: Purpose, *, clock: Clock = utc_now_us
) -> User:
    """Whose token this is, without using it up; raises InvalidToken."""
    found = await session.execute(
        select(EmailToken.user_id, EmailToken.email).where(*_works(token, purpose, clock()))
    )
    return await _holder(session, found.one_or_none())


async def redeem(
    session: AsyncSession, token: str, purpose: Purpose, *, clock: Clock = utc_now_us
) -> User:
    """Whose token this was, now used up; raises InvalidToken.

    One guarded UPDATE decides: of any number of attempts at once, one gets through.
    """
    now_us = clock()
    found = await session.execute(
        update(EmailToken)
        .where(*_works(token, purpose, now_us))
        .values(used_at=now_us)
        .returning(EmailToken.user_id, EmailToken.email)
        .execution_options(synchronize_session=False)
    )
    return await _holder(session, found.one_or_none())


async def revoke_all(session: AsyncSession, user_id: str, purpose: Purpose) -> None:
    """Make the user's other tokens of this purpose worthless."""
    await session.execute(
        delete(EmailToken).where(
            EmailToken.user_id == user_id,
            EmailToken.purpose == purpose,
            EmailToken.used_at.is_(None),
        )
    )


async def purge_expired(session: AsyncSession, *, clock: Clock = utc_now_us) -> int:
    """Delete the tokens that can no longer be used; returns how many."""
    result = await session.execute(delete(EmailToken).where(EmailToken.expires_at <= clock()))
    return cast(CursorResult[Any], result).rowcount


def _works(token: str, purpose: Purpose, now_us: int) -> tuple[ColumnElement[bool], ...]:
    if len(token) > MAX_LENGTH:
        raise InvalidToken("This link does not work.")
    return (
        EmailToken.token_hash == _hash(token),
        EmailToken.purpose == purpose,
        EmailToken.used_at.is_(None),
        EmailToken.expires_at > now_us,
    )


async def _holder(session: AsyncSession, row: Any) -> User:
    user = await session.get(User, row.user_id) if row is not None else None
    # The token proves the address that it was sent to, which may have been changed since.
    if row is None or user is None or user.email != row.email or user.status != "active":
        raise InvalidToken("This link has been used, has expired, or was never valid.")
    return user


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
