"""API keys: issued once, stored as an HMAC, revoked at once.

A key's secret has 190 random bits, so it needs no slow hash: an HMAC takes 2 µs where argon2id
would cap a core at 50 requests a second. The pepper lives outside the database: a stolen table
verifies nothing. Peppers have versions, so that they can be rotated without breaking keys.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import SecretStr
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import key_format
from accounts.errors import InvalidKey, KeyExpired, KeyNotFound, KeyRevoked, ScopeNotAllowed
from accounts.models import ApiKey, Organization
from accounts.principal import SCOPES, Principal
from accounts.projects import find_project
from common.clock import Clock, utc_now_us
from common.ids import new_id

MAX_NAME_LENGTH = 100


class KeyRing:
    """The peppers by version. The highest version signs, every version verifies."""

    def __init__(self, peppers: Mapping[int, SecretStr]) -> None:
        if not peppers:
            raise ValueError("NCOMPASS_ACCOUNTS_API_KEY_PEPPERS is missing: no key can be verified")
        self._peppers = {v: pepper.get_secret_value().encode() for v, pepper in peppers.items()}
        self.current_version = max(self._peppers)

    def mac(self, plaintext: str, version: int) -> str | None:
        """HMAC-SHA256 of the whole key; None when that pepper has been retired."""
        pepper = self._peppers.get(version)
        if pepper is None:
            return None
        return hmac.new(pepper, plaintext.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key. `plaintext` exists nowhere else and cannot be shown again."""

    plaintext: str
    key: ApiKey

    def __repr__(self) -> str:
        return f"IssuedKey({self.key.prefix}…)"


async def issue(
    session: AsyncSession,
    owner: Principal | str,
    *,
    name: str,
    scopes: Iterable[str],
    created_by: str | None,
    key_ring: KeyRing,
    project_id: str | None = None,
    expires_at: int | None = None,
    clock: Clock = utc_now_us,
) -> IssuedKey:
    """A new key for an organization; raises ScopeNotAllowed, ProjectNotFound.

    `owner` is who asks (nobody grants more scopes than they hold), or an organization's id when
    the platform itself asks: at sign-up and from the operator's command line.
    """
    organization_id = owner.organization_id if isinstance(owner, Principal) else owner
    if project_id is not None:
        await find_project(session, organization_id, project_id)
    granted = frozenset(scopes)
    allowed = owner.scopes if isinstance(owner, Principal) else SCOPES
    if not granted or not granted <= allowed:
        raise ScopeNotAllowed("These scopes cannot be granted.", scopes=sorted(granted - allowed))
    plaintext = key_format.generate()
    mac = key_ring.mac(plaintext, key_ring.current_version)
    assert mac is not None
    key = ApiKey(
        id=new_id("key"),
        organization_id=organization_id,
        project_id=project_id,
        created_by=created_by,
        name=name.strip()[:MAX_NAME_LENGTH] or "API key",
        prefix=key_format.prefix_of(plaintext),
        mac=mac,
        pepper_version=key_ring.current_version,
        last4=plaintext[-4:],
        scopes=" ".join(sorted(granted)),
        created_at=clock(),
        expires_at=expires_at,
    )
    session.add(key)
    await session.flush()
    return IssuedKey(plaintext, key)


async def authenticate(
    session: AsyncSession, plaintext: str, key_ring: KeyRing, *, clock: Clock = utc_now_us
) -> Principal:
    """Who holds this key; raises InvalidKey, KeyRevoked, KeyExpired."""
    found = await session.scalars(
        select(ApiKey)
        .join(Organization, Organization.id == ApiKey.organization_id)
        .where(ApiKey.prefix == key_format.prefix_of(plaintext), Organization.status != "closed")
    )
    key = found.one_or_none()
    mac = key_ring.mac(plaintext, key.pepper_version) if key is not None else None
    if key is None or mac is None or not hmac.compare_digest(mac, key.mac):
        raise InvalidKey("This API key is not known.")
    require_live(key.id, key.revoked_at, key.expires_at, now_us=clock())
    return Principal(
        organization_id=key.organization_id,
        user_id=key.created_by,
        api_key_id=key.id,
        scopes=frozenset(key.scopes.split()),
    )


def require_live(
    key_id: str, revoked_at: int | None, expires_at: int | None, *, now_us: int
) -> None:
    """Raise KeyRevoked or KeyExpired; asked again inside the transaction that admits a request."""
    if revoked_at is not None:
        raise KeyRevoked("This API key has been revoked.", api_key_id=key_id)
    if expires_at is not None and expires_at <= now_us:
        raise KeyExpired("This API key has expired.", api_key_id=key_id)


async def list_keys(session: AsyncSession, organization_id: str) -> list[ApiKey]:
    """Every key of an organization, revoked ones too, newest first."""
    found = await session.scalars(
        select(ApiKey)
        .where(ApiKey.organization_id == organization_id)
        .order_by(ApiKey.created_at.desc(), ApiKey.id.desc())
    )
    return list(found)


async def revoke(
    session: AsyncSession, organization_id: str, key_id: str, *, clock: Clock = utc_now_us
) -> ApiKey:
    """Revoke a key of this organization for good; again is harmless. Raises KeyNotFound."""
    found = await session.scalars(
        select(ApiKey).where(ApiKey.organization_id == organization_id, ApiKey.id == key_id)
    )
    key = found.one_or_none()
    if key is None:
        raise KeyNotFound("This organization has no such key.", api_key_id=key_id)
    if key.revoked_at is None:
        key.revoked_at = clock()
        await session.flush()
    return key


async def record_last_used(session: AsyncSession, used: Mapping[str, int]) -> None:
    """Note when keys (id → microseconds) were last used; never moves a time backwards."""
    for key_id in sorted(used):
        await session.execute(
            update(ApiKey)
            .where(
                ApiKey.id == key_id,
                (ApiKey.last_used_at.is_(None)) | (ApiKey.last_used_at < used[key_id]),
            )
            .values(last_used_at=used[key_id])
        )
