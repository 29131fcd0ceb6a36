"""Requests that wait for credit: one look at the balances that they wait for, once a second.

Whatever brings or frees credit (a top-up, an automatic recharge, an operator, another request's
settlement), in whatever process, ends in `balances`; so nothing need be announced, and nothing can be
missed. As many are woken, in the order in which they came, as the credit covers.
"""

import asyncio
from dataclasses import dataclass

from sqlalchemy import select

from billing.models import Balance
from common.db import Sessions, read_only

MAX_ORGANIZATIONS = 1_000
"""In one query."""


@dataclass(eq=False, slots=True)
class _Waiter:
    organization_id: str
    required: int
    woken: asyncio.Future[None]


class CreditWatch:
    """The waiting requests of one process. Somebody calls `look` now and then."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._waiters: dict[_Waiter, None] = {}
        """In the order of their coming."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiters)

    async def wait(self, organization_id: str, required: int) -> None:
        """Return once the organization seems to have `required` nano-dollars to spend.

        Another process may be quicker to spend them: try, and come back if need be.
        """
        woken = asyncio.get_running_loop().create_future()
        waiter = _Waiter(organization_id, required, woken)
        self._waiters[waiter] = None
        try:
            await woken
        finally:
            self._waiters.pop(waiter, None)

    async def look(self) -> None:
        """Wake whom the credit covers by now; asks for nothing while nobody waits."""
        awaited = sorted({waiter.organization_id for waiter in self._waiters})
        available: dict[str, int] = {}
        for start in range(0, len(awaited), MAX_ORGANIZATIONS):
            available |= await self._available(awaited[start : start + MAX_ORGANIZATIONS])
        for waiter in list(self._waiters):
            left = available.get(waiter.organization_id, 0)
            if waiter.required <= left and not waiter.woken.done():
                available[waiter.organization_id] = left - waiter.required
                waiter.woken.set_result(None)

    async def _available(self, organization_ids: list[str]) -> dict[str, int]:
        async with read_only(self._sessions) as session:
            found = await session.execute(
                select(
                    Balance.organization_id, Balance.posted_nano_usd - Balance.held_nano_usd
                ).where(Balance.organization_id.in_(organization_ids))
            )
            return {row[0]: row[1] for row in found}
