"""The audit log: who did what to which object. Append-only, without secrets."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.models import AuditEvent
from accounts.principal import Principal
from common.clock import Clock, utc_now_us
from common.ids import new_id

SECRET_NAMES = frozenset({"password", "token", "secret", "plaintext", "key", "csrf_token"})


async def record(
    session: AsyncSession,
    action: str,
    *,
    principal: Principal | None = None,
    organization_id: str | None = None,
    user_id: str | None = None,
    target: str | None = None,
    address: str | None = None,
    clock: Clock = utc_now_us,
    **facts: Any,
) -> None:
    """Write one event in the caller's transaction, so that it exists exactly if the deed does.

    `action` is `noun.verb` (`api_key.revoked`), `target` what it was done to, `address` an IP.
    """
    leaked = SECRET_NAMES & facts.keys()
    assert not leaked, f"the audit log takes no secrets: {sorted(leaked)}"
    if principal is not None:
        organization_id = organization_id or principal.organization_id
        user_id = user_id or principal.user_id
    session.add(
        AuditEvent(
            id=new_id("aud"),
            organization_id=organization_id,
            user_id=user_id,
            api_key_id=principal.api_key_id if principal is not None else None,
            action=action,
            target=target,
            address=address,
            facts=facts,
            created_at=clock(),
        )
    )
    await session.flush()


async def recent(session: AsyncSession, organization_id: str, limit: int) -> list[AuditEvent]:
    """The latest events of one organization, newest first."""
    found = await session.scalars(
        select(AuditEvent)
        .where(AuditEvent.organization_id == organization_id)
        .order_by(AuditEvent.created_at.desc(), AuditEvent.id.desc())
        .limit(limit)
    )
    return list(found)
