"""Credit that ends: what is left of a lot after its time goes back to whom it came from.

Running requests keep what they hold; the rest of an expired lot goes when they have ended. So an
expiry never takes a balance below zero, and never cuts a stream.
"""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from billing import chart, ledger
from billing.ledger import Posting
from billing.models import Balance, CreditLot
from common.clock import Clock, utc_now_us
from common.db import Sessions, read_only

MAX_PER_RUN = 500


async def sweep(sessions: Sessions, *, clock: Clock = utc_now_us) -> int:
    """Take what is left of every lot whose time has come; returns of how many something was taken."""
    async with read_only(sessions) as session:
        found = await session.scalars(
            select(CreditLot.id)
            .where(CreditLot.expires_at <= clock(), CreditLot.remaining_nano_usd > 0)
            .order_by(CreditLot.expires_at, CreditLot.created_at, CreditLot.id)
            .limit(MAX_PER_RUN)
        )
        lot_ids = list(found)
    taken = 0
    for lot_id in lot_ids:
        async with sessions.begin() as session:
            taken += await _take(session, lot_id, clock=clock)
    return taken


async def _take(session: AsyncSession, lot_id: str, *, clock: Clock) -> bool:
    """Take what is left of one lot and held by nobody, under the balance's lock."""
    balance = (
        await session.execute(
            select(Balance.organization_id, Balance.posted_nano_usd - Balance.held_nano_usd)
            .join(CreditLot, CreditLot.organization_id == Balance.organization_id)
            .where(CreditLot.id == lot_id)
            .with_for_update(of=Balance)
        )
    ).one()
    organization_id, available = balance
    lot = await session.get_one(CreditLot, lot_id, populate_existing=True)
    amount = min(lot.remaining_nano_usd, available)
    if amount <= 0:
        return False
    await ledger.post(
        session,
        # What is left only ever shrinks, so it names this part of the expiry and no other.
        key=f"expiry:{lot_id}:{lot.remaining_nano_usd}",
        kind="expiry",
        organization_id=organization_id,
        postings=[
            Posting(chart.customer(organization_id), -amount),
            Posting(chart.BREAKAGE, amount),
        ],
        actor="platform",
        memo="Credit that was not used in time",
        lot_id=lot_id,
        clock=clock,
    )
    return True
