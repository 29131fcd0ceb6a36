"""Refunds: partial, repeated, failed. One ledger transaction a refund, and one if it fails.

The credit is taken when the refund is asked for, so that it cannot be spent meanwhile; refunds that
were made in Stripe's dashboard are taken when we hear of them, and may leave a balance below zero.
"""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import audit
from billing import chart, ledger, topups
from billing.errors import PaymentRefused, RefundTooLarge, TopupNotFound
from billing.ledger import Posting
from billing.payment_models import NANO_USD_PER_CENT, Dispute, Refund, Topup
from billing.stripe_client import Payments, RefundFacts
from common.clock import Clock, utc_now_us
from common.db import Sessions, read_only
from common.ids import new_id

FAILED = frozenset({"failed", "canceled"})


async def request(
    session: AsyncSession,
    topup_id: str,
    *,
    amount_cents: int,
    reason: str,
    actor: str,
    clock: Clock = utc_now_us,
) -> Refund:
    """Take the credit and note the refund; `send` then asks Stripe for it.

    Raises TopupNotFound, and RefundTooLarge for more than is left of the payment or the credit,
    or while the payment is disputed (Stripe refuses that).
    """
    topup = await session.get(Topup, topup_id, with_for_update=True)
    if topup is None or topup.state != "paid":
        raise TopupNotFound("There is no such paid top-up.", topup_id=topup_id)
    left = topup.amount_cents - await _refunded(session, topup_id)
    if not 0 < amount_cents <= left:
        raise RefundTooLarge("More than is left of this payment.", left_cents=left)
    disputed = await session.scalar(
        select(func.count()).where(Dispute.topup_id == topup_id, Dispute.is_withdrawn)
    )
    if disputed:
        raise RefundTooLarge("This payment is disputed.", left_cents=0)
    now = clock()
    refund = Refund(
        id=new_id("ref"),
        organization_id=topup.organization_id,
        topup_id=topup_id,
        amount_cents=amount_cents,
        state="requested",
        reason=reason,
        created_at=now,
        updated_at=now,
    )
    session.add(refund)
    await _take(session, refund, actor=actor, clock=clock)
    balance = await ledger.balance(session, topup.organization_id)
    if balance.available < 0:
        raise RefundTooLarge("The credit has been used, or is held by running requests.")
    await audit.record(
        session,
        "topup.refunded",
        organization_id=topup.organization_id,
        target=refund.id,
        amount_cents=amount_cents,
        reason=reason,
        actor=actor,
        clock=clock,
    )
    return refund


async def send(
    sessions: Sessions, payments: Payments, refund_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Ask Stripe for a refund that was requested; again is harmless. Raises PaymentsUnavailable."""
    async with read_only(sessions) as session:
        refund = await session.get_one(Refund, refund_id)
        topup = await session.get_one(Topup, refund.topup_id)
    if refund.state != "requested":
        return
    assert topup.payment_intent_id is not None
    try:
        facts = await payments.create_refund(
            refund_id, payment_intent_id=topup.payment_intent_id, amount_cents=refund.amount_cents
        )
    except PaymentRefused:
        async with sessions.begin() as session:
            refund = await session.get_one(Refund, refund_id, with_for_update=True)
            await _give_back(session, refund, clock=clock)
        return
    await apply(sessions, facts, clock=clock)


async def converge(
    sessions: Sessions, payments: Payments, stripe_refund_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Bring our side to where a refund of Stripe's is."""
    facts = await payments.retrieve_refund(stripe_refund_id)
    await topups.meet(sessions, payments, facts.payment_intent_id, clock=clock)
    await apply(sessions, facts, clock=clock)


async def converge_charge(
    sessions: Sessions, payments: Payments, charge_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Every refund of a charge, each by itself: their sum says nothing about which came when."""
    for facts in await payments.list_refunds(charge_id):
        await topups.meet(sessions, payments, facts.payment_intent_id, clock=clock)
        await apply(sessions, facts, clock=clock)


async def apply(sessions: Sessions, facts: RefundFacts, *, clock: Clock = utc_now_us) -> None:
    """The same, for a refund that Stripe has just shown us; does nothing for foreign ones."""
    async with sessions.begin() as session:
        topup = await topups.lock_by_intent(session, facts.payment_intent_id)
        if topup is None:
            return
        refund = await _of(session, topup.id, facts)
        if refund is None:
            refund = Refund(
                id=facts.id,
                organization_id=topup.organization_id,
                topup_id=topup.id,
                amount_cents=facts.amount_cents,
                state="requested",
                reason="made at Stripe",
                created_at=clock(),
                updated_at=clock(),
            )
            session.add(refund)
            await _take(session, refund, actor="stripe", clock=clock)
        refund.stripe_refund_id = facts.id
        if facts.status in FAILED:
            await _give_back(session, refund, clock=clock)
        elif refund.state == "requested":
            refund.state, refund.updated_at = "taken", clock()


async def _of(session: AsyncSession, topup_id: str, facts: RefundFacts) -> Refund | None:
    """Our row of a refund: the one that we asked for, else the one that bears Stripe's id.

    Metadata can be written by whoever uses the dashboard, so that it must fit the payment.
    """
    for refund_id in (facts.refund_id, facts.id):
        refund = await session.get(Refund, refund_id) if refund_id else None
        if refund is not None and refund.topup_id == topup_id:
            return refund
    return None


async def _refunded(session: AsyncSession, topup_id: str) -> int:
    total = await session.scalar(
        select(func.coalesce(func.sum(Refund.amount_cents), 0)).where(
            Refund.topup_id == topup_id, Refund.state != "failed"
        )
    )
    return int(total or 0)


async def _take(session: AsyncSession, refund: Refund, *, actor: str, clock: Clock) -> None:
    await _post(session, refund, key=f"re:{refund.id}", sign=-1, actor=actor, clock=clock)


async def _give_back(session: AsyncSession, refund: Refund, *, clock: Clock) -> None:
    if refund.state == "failed":
        return
    refund.state, refund.updated_at = "failed", clock()
    await _post(session, refund, key=f"re:{refund.id}:failed", sign=1, actor="stripe", clock=clock)


async def _post(
    session: AsyncSession, refund: Refund, *, key: str, sign: int, actor: str, clock: Clock
) -> None:
    amount = sign * refund.amount_cents * NANO_USD_PER_CENT
    await ledger.post(
        session,
        key=key,
        kind="refund" if sign < 0 else "refund_failed",
        organization_id=refund.organization_id,
        postings=[
            Posting(chart.customer(refund.organization_id), amount),
            Posting(chart.STRIPE_CLEARING, -amount),
        ],
        actor=actor,
        memo="Refund" if sign < 0 else "Refund that failed",
        lot_kind="paid",
        is_paid_used_first=True,
        clock=clock,
    )
