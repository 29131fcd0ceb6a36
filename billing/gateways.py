"""A gateway's lease: the sign of life that keeps its holds open, on the database's clock."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from billing.models import Gateway
from common.clock import MICROSECONDS_PER_SECOND
from common.db import Sessions, database_now_us
from common.upsert import insert_for


class GatewayLease:
    """One API process's lease. Renew it before the first hold and every few seconds from then on.

    A gateway that renews too late finds its holds closed by the sweeper, and itself fenced.
    """

    def __init__(self, sessions: Sessions, gateway_id: str, *, lease_s: int = 30) -> None:
        self._sessions = sessions
        self._gateway_id = gateway_id
        self._lease_s = lease_s

    async def renew(self) -> None:
        """Live for another `lease_s` seconds."""
        async with self._sessions.begin() as session:
            await self._set(session, self._lease_s)

    async def release(self) -> None:
        """End the lease now, so that what is left open is closed at the next sweep."""
        async with self._sessions.begin() as session:
            await self._set(session, 0)

    async def _set(self, session: AsyncSession, lease_s: int) -> None:
        now_us = await session.scalar(select(database_now_us()))
        assert now_us is not None
        lease_until = now_us + lease_s * MICROSECONDS_PER_SECOND
        await session.execute(
            insert_for(session, Gateway)
            .values(id=self._gateway_id, lease_until=lease_until, started_at=now_us)
            .on_conflict_do_update(index_elements=["id"], set_={"lease_until": lease_until})
        )
