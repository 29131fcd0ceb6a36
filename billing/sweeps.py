"""Sweeps: what must happen even when the process that should have done it is dead.

Each is safe to run twice and at the same time in several places.
"""

from sqlalchemy import delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from billing.hold_book import HoldBook, PriceCache
from billing.hold_operations import VoidHold
from billing.models import Gateway, HoldRecord
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Sessions, database_now_us

MAX_HOLDS_PER_SWEEP = 500
MAX_TRANSACTIONS_PER_SWEEP = 100
FORGET_GATEWAYS_AFTER_S = 86_400


async def close_lost_gateways(session: AsyncSession, *, clock: Clock = utc_now_us) -> int:
    """Void the open holds of gateways without a lease; returns how many, at most 500.

    The epoch moves on, so that a gateway that wakes up later can neither extend nor settle them.
    """
    is_alive = exists().where(
        Gateway.id == HoldRecord.gateway, Gateway.lease_until > database_now_us()
    )
    found = await session.execute(
        select(HoldRecord.request_id, HoldRecord.epoch)
        .where(HoldRecord.state == "open", ~is_alive)
        .order_by(HoldRecord.request_id)
        .limit(MAX_HOLDS_PER_SWEEP)
        .with_for_update(of=HoldRecord, skip_locked=True)
    )
    voids = [
        VoidHold(request_id, epoch, "gateway_lost", is_fencing=True) for request_id, epoch in found
    ]
    if voids:
        connection = await session.connection()
        book = await HoldBook.open(connection, voids, PriceCache(), clock=clock)
        for void in voids:
            book.apply(void)
        await book.write(connection)
    return len(voids)


async def close_all_lost(sessions: Sessions, *, clock: Clock = utc_now_us) -> int:
    """Close everything that lost gateways held, 500 holds a transaction; returns how many."""
    closed = 0
    for _ in range(MAX_TRANSACTIONS_PER_SWEEP):
        async with sessions.begin() as session:
            batch = await close_lost_gateways(session, clock=clock)
        closed += batch
        if batch < MAX_HOLDS_PER_SWEEP:
            break
    return closed


async def forget_dead_gateways(session: AsyncSession) -> None:
    """Delete the leases of gateways that have been dead for a day."""
    oldest_us = FORGET_GATEWAYS_AFTER_S * MICROSECONDS_PER_SECOND
    await session.execute(
        delete(Gateway).where(Gateway.lease_until < database_now_us() - oldest_us)
    )
