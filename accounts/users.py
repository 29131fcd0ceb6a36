"""Users: create one, and prove to be one."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import emails
from accounts.errors import BadCredentials, EmailTaken, InvalidEmail
from accounts.models import User
from accounts.passwords import PasswordHasher, require_strong
from accounts.settings import AccountsSettings
from common.clock import Clock, utc_now_us
from common.ids import new_id
from common.upsert import insert_or_ignore


async def create_user(
    session: AsyncSession,
    *,
    email: str,
    password: str,
    hasher: PasswordHasher,
    settings: AccountsSettings,
    clock: Clock = utc_now_us,
) -> User:
    """A new user; raises InvalidEmail, DisposableEmail, WeakPassword, EmailTaken.

    The password is hashed before the first statement, so that no lock is held meanwhile.
    """
    address = emails.normalize(email)
    if settings.is_disposable_email_refused:
        emails.refuse_disposable(address)
    require_strong(password, email=address)
    user_id = new_id("user")
    is_new = await insert_or_ignore(
        session,
        User,
        {
            "id": user_id,
            "email": address,
            "email_canonical": emails.canonical(address),
            "password_hash": await hasher.hash(password),
            "email_verified_at": None,
            "status": "active",
            "created_at": clock(),
        },
    )
    if not is_new:
        raise EmailTaken("There is an account for this e-mail address already.")
    return await session.get_one(User, user_id)


async def find_by_email(session: AsyncSession, email: str) -> User | None:
    """The user whose inbox this is, whatever the spelling; raises InvalidEmail."""
    found = await session.scalars(
        select(User).where(User.email_canonical == emails.canonical(email))
    )
    return found.one_or_none()


async def authenticate(
    session: AsyncSession, email: str, password: str, *, hasher: PasswordHasher
) -> User:
    """The user who knows this password; raises BadCredentials.

    An unknown address costs as much work as a known one. It only reads: give it a `read_only`
    session, so that SQLite's write lock is free while argon2id runs.
    """
    try:
        user = await find_by_email(session, email)
    except InvalidEmail:
        user = None
    password_hash = user.password_hash if user is not None else None
    is_right = await hasher.verify(password, password_hash)
    if user is None or not is_right or user.status != "active":
        raise BadCredentials("The e-mail address or the password is wrong.")
    return user
