"""Sweeps of payments: what was lost on the way to us is fetched, and the books meet Stripe's."""

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from billing import chart, refunds, topups, webhooks
from billing.errors import PaymentsUnavailable
from billing.models import LedgerEntry
from billing.payment_models import NANO_USD_PER_CENT, Refund, SweepMark, Topup
from billing.reconcile import Check
from billing.stripe_client import Payments
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Sessions, read_only
from common.upsert import insert_or_ignore

EVENTS = "stripe_events"
OVERLAP_S = 3_600
"""Listed again each time: an event may be listed later than it happened."""
FIRST_LOOK_BACK_S = 29 * 86_400
STALE_AFTER_S = 300
GIVE_UP_AFTER_S = 86_400
MAX_PER_SWEEP = 200


async def sweep(sessions: Sessions, payments: Payments, *, clock: Clock = utc_now_us) -> None:
    """List lost events into the inbox, ask after old top-ups, repeat refunds without an answer."""
    await _list_events(sessions, payments, clock=clock)
    async with read_only(sessions) as session:
        old_topups = await _stale_topups(session, clock())
        old_refunds = await _unsent_refunds(session, clock())
    for topup in old_topups:
        await _ask_after(sessions, payments, topup, clock=clock)
    for refund_id in old_refunds:
        await refunds.send(sessions, payments, refund_id, clock=clock)


async def compare_with_stripe(sessions: Sessions, payments: Payments) -> Check:
    """Our clearing account against all that has moved at Stripe, before its fees, to the cent.

    What moves while this runs is a difference for a moment; one that stays is not.
    """
    cents = sum((await payments.cents_by_kind()).values())
    async with read_only(sessions) as session:
        total = await session.scalar(
            select(func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0)).where(
                LedgerEntry.account == chart.STRIPE_CLEARING
            )
        )
    difference = -int(total or 0) - cents * NANO_USD_PER_CENT
    name = "the clearing account equals Stripe"
    if difference == 0:
        return Check(name, True, "holds")
    return Check(name, False, f"{chart.STRIPE_CLEARING} differs by {difference}")


async def _list_events(sessions: Sessions, payments: Payments, *, clock: Clock) -> None:
    started_s = clock() // MICROSECONDS_PER_SECOND
    async with read_only(sessions) as session:
        mark = await session.get(SweepMark, EVENTS)
    since_s = started_s - FIRST_LOOK_BACK_S if mark is None else mark.done_until - OVERLAP_S
    events = await payments.list_events(since_s=since_s, types=webhooks.SWEPT_TYPES)
    async with sessions.begin() as session:
        for event in events:
            await webhooks.store(session, event, clock=clock)
        await insert_or_ignore(session, SweepMark, {"name": EVENTS, "done_until": started_s})
        mark = await session.get_one(SweepMark, EVENTS)
        mark.done_until = max(mark.done_until, started_s)


async def _stale_topups(session: AsyncSession, now_us: int) -> list[Topup]:
    """Open top-ups that nobody has spoken of for five minutes; recharges have their own sweep."""
    found = await session.scalars(
        select(Topup)
        .where(
            or_(Topup.state == "processing", Topup.kind == "checkout"),
            Topup.state.in_(("pending", "processing")),
            Topup.updated_at < now_us - STALE_AFTER_S * MICROSECONDS_PER_SECOND,
        )
        .order_by(Topup.updated_at)
        .limit(MAX_PER_SWEEP)
    )
    return list(found)


async def _unsent_refunds(session: AsyncSession, now_us: int) -> list[str]:
    found = await session.scalars(
        select(Refund.id)
        .where(
            Refund.state == "requested",
            Refund.updated_at < now_us - STALE_AFTER_S * MICROSECONDS_PER_SECOND,
        )
        .order_by(Refund.updated_at)
        .limit(MAX_PER_SWEEP)
    )
    return list(found)


async def _ask_after(sessions: Sessions, payments: Payments, topup: Topup, *, clock: Clock) -> None:
    """Ask Stripe for the object; a top-up that never got to Stripe is given up after a day."""
    try:
        if topup.payment_intent_id is not None:
            await topups.converge_intent(sessions, payments, topup.payment_intent_id, clock=clock)
        elif topup.session_id is not None:
            await topups.converge_checkout(sessions, payments, topup.session_id, clock=clock)
    except PaymentsUnavailable:
        return
    async with sessions.begin() as session:
        current = await session.get_one(Topup, topup.id, with_for_update=True)
        age_s = (clock() - current.created_at) // MICROSECONDS_PER_SECOND
        if current.state == "pending" and topup.session_id is None and age_s > GIVE_UP_AFTER_S:
            current.state = "expired"
        current.updated_at = clock()
