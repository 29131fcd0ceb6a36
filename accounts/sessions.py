"""Browser sessions: an opaque 256-bit token in the cookie, its hash in the table.

A new token is made at every login (nothing to fixate), and each session has its own CSRF token.
"""

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.models import Membership, Organization, Session, User
from accounts.principal import ACCOUNT, INFERENCE, Principal
from accounts.settings import AccountsSettings
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us

SCOPES = frozenset({ACCOUNT, INFERENCE})
MAX_TOKEN_LENGTH = 100


@dataclass(frozen=True, slots=True)
class StartedSession:
    """What the browser gets; the token is shown this once. `expires_at` in microseconds."""

    token: str
    csrf_token: str
    expires_at: int


@dataclass(frozen=True, slots=True)
class FoundSession:
    """Whose session it is, and the CSRF token that its forms must carry."""

    principal: Principal
    csrf_token: str
    user_email: str


async def start(
    session: AsyncSession,
    user: User,
    organization_id: str,
    *,
    settings: AccountsSettings,
    clock: Clock = utc_now_us,
) -> StartedSession:
    """Log a user in, in one of the organizations that the user belongs to."""
    started = StartedSession(
        token=secrets.token_urlsafe(32),
        csrf_token=secrets.token_urlsafe(32),
        expires_at=clock() + settings.session_ttl_s * MICROSECONDS_PER_SECOND,
    )
    session.add(
        Session(
            id_hash=_hash(started.token),
            user_id=user.id,
            organization_id=organization_id,
            csrf_token=started.csrf_token,
            created_at=clock(),
            expires_at=started.expires_at,
        )
    )
    await session.flush()
    return started


async def find(
    session: AsyncSession, token: str, *, clock: Clock = utc_now_us
) -> FoundSession | None:
    """The live session of a token; None when unknown, expired, or its user may no longer enter."""
    if len(token) > MAX_TOKEN_LENGTH:
        return None
    found = await session.execute(
        select(Session, User.email)
        .join(User, User.id == Session.user_id)
        .join(Organization, Organization.id == Session.organization_id)
        .join(
            Membership,
            (Membership.organization_id == Session.organization_id)
            & (Membership.user_id == Session.user_id),
        )
        .where(
            Session.id_hash == _hash(token),
            Session.expires_at > clock(),
            User.status == "active",
            Organization.status != "closed",
        )
    )
    row = found.one_or_none()
    if row is None:
        return None
    login, email = row
    return FoundSession(
        principal=Principal(
            organization_id=login.organization_id,
            user_id=login.user_id,
            api_key_id=None,
            scopes=SCOPES,
        ),
        csrf_token=login.csrf_token,
        user_email=email,
    )


async def end(session: AsyncSession, token: str) -> None:
    """Log out: the token is worthless once this commits."""
    await session.execute(delete(Session).where(Session.id_hash == _hash(token)))


async def end_all(session: AsyncSession, user_id: str) -> None:
    """Log a user out everywhere."""
    await session.execute(delete(Session).where(Session.user_id == user_id))


async def purge_expired(session: AsyncSession, *, clock: Clock = utc_now_us) -> None:
    """Delete the sessions that have ended by themselves."""
    await session.execute(delete(Session).where(Session.expires_at <= clock()))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
