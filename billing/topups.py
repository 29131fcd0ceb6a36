"""Top-ups: what a customer pays in becomes credit once, whichever way we hear of it.

The page they return to, the webhooks (in any order, any number of times) and the sweep all end in
`converge…`: ask Stripe how the object stands, and bring our row and the ledger to that.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from billing import chart, ledger, payment_mail
from billing.errors import InvalidAmount, LedgerConflict, PaymentMismatch, TopupNotFound
from billing.ledger import Posting
from billing.payment_models import PaymentProfile, Topup
from billing.payment_profiles import ensure_customer, find_profile
from billing.stripe_client import Checkout, Intent, Payments
from common.clock import Clock, utc_now_us
from common.db import Sessions, read_only
from common.ids import new_id
from common.upsert import insert_or_ignore

MIN_CENTS = 500
MAX_CENTS = 500_000


@dataclass(frozen=True, slots=True)
class ReturnPages:
    """Where Stripe's page leads back to."""

    success: str
    cancel: str


async def start(
    session: AsyncSession,
    organization_id: str,
    *,
    amount_cents: int,
    idempotency_key: str,
    kind: str = "checkout",
    clock: Clock = utc_now_us,
) -> Topup | None:
    """A new top-up, or the one that this key has started already.

    None when another recharge of this organization is open. Raises InvalidAmount, LedgerConflict.
    """
    if not MIN_CENTS <= amount_cents <= MAX_CENTS:
        raise InvalidAmount(
            f"A top-up is ${MIN_CENTS // 100} at least and ${MAX_CENTS // 100:,} at most."
        )
    now = clock()
    values = {
        "id": new_id("top"),
        "organization_id": organization_id,
        "kind": kind,
        "amount_cents": amount_cents,
        "state": "pending",
        "idempotency_key": idempotency_key,
        "created_at": now,
        "updated_at": now,
    }
    await insert_or_ignore(session, Topup, values)
    found = await session.scalars(
        select(Topup).where(
            Topup.organization_id == organization_id, Topup.idempotency_key == idempotency_key
        )
    )
    topup = found.one_or_none()
    if topup is not None and topup.amount_cents != amount_cents:
        raise LedgerConflict("This key belongs to another top-up.", topup_id=topup.id)
    return topup


async def open_checkout(
    sessions: Sessions,
    payments: Payments,
    topup_id: str,
    *,
    email: str,
    is_card_saved: bool,
    pages: ReturnPages,
) -> str:
    """The address of Stripe's page for this top-up; again, the same page."""
    async with read_only(sessions) as session:
        topup = await session.get_one(Topup, topup_id)
    customer_id = await ensure_customer(sessions, payments, topup.organization_id, email=email)
    checkout = await payments.create_checkout(
        topup_id,
        amount_cents=topup.amount_cents,
        customer_id=customer_id,
        is_card_saved=is_card_saved,
        success_url=pages.success,
        cancel_url=pages.cancel,
    )
    async with sessions.begin() as session:
        topup = await session.get_one(Topup, topup_id, with_for_update=True)
        topup.session_id = checkout.id
    if checkout.url is None:
        raise PaymentMismatch("This payment page is closed.", topup_id=topup_id)
    return checkout.url


async def converge_checkout(
    sessions: Sessions, payments: Payments, session_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Bring the top-up of a Checkout page to where the page is; does nothing for foreign ones."""
    checkout = await payments.retrieve_checkout(session_id)
    if checkout.payment_intent_id is not None and checkout.payment_status != "unpaid":
        await converge_intent(
            sessions, payments, checkout.payment_intent_id, checkout=checkout, clock=clock
        )
        return
    async with sessions.begin() as session:
        topup = await _lock(session, checkout.topup_id)
        if topup is None or topup.state in ("paid", "failed"):
            return
        topup.session_id = checkout.id
        if checkout.status == "expired":
            _move(topup, "expired", clock)
        elif checkout.status == "complete":
            topup.payment_intent_id = checkout.payment_intent_id
            _move(topup, "processing", clock)


async def converge_intent(
    sessions: Sessions,
    payments: Payments,
    payment_intent_id: str,
    *,
    checkout: Checkout | None = None,
    clock: Clock = utc_now_us,
) -> None:
    """Bring the top-up of a payment to where the payment is; does nothing for foreign ones."""
    intent = await payments.retrieve_intent(payment_intent_id)
    await apply_intent(sessions, payments, intent, checkout=checkout, clock=clock)


async def apply_intent(
    sessions: Sessions,
    payments: Payments,
    intent: Intent,
    *,
    checkout: Checkout | None = None,
    clock: Clock = utc_now_us,
) -> None:
    """The same, for a payment that Stripe has just shown us; raises PaymentMismatch."""
    card_label = None
    if intent.status == "succeeded" and intent.is_card_saved and intent.payment_method_id:
        card_label = await payments.describe_card(intent.payment_method_id)
    async with sessions.begin() as session:
        topup = await _lock(session, intent.topup_id)
        if topup is None or topup.state == "paid":
            return
        if intent.status == "succeeded":
            await _pay(session, topup, intent, checkout, clock=clock)
            profile = await find_profile(session, topup.organization_id, is_locked=True)
            if profile is not None:
                _after_success(profile, topup, intent, card_label)
        elif intent.status == "processing":
            _move(topup, "processing", clock)
        elif intent.status == "canceled" or topup.state == "processing":
            topup.failure = intent.failure or intent.status
            _move(topup, "failed", clock)


async def meet(
    sessions: Sessions, payments: Payments, payment_intent_id: str | None, *, clock: Clock
) -> None:
    """Know a payment before what became of it: its refund may be heard of first."""
    if payment_intent_id is None:
        return
    async with read_only(sessions) as session:
        known = select(Topup.id).where(Topup.payment_intent_id == payment_intent_id)
        is_known = await session.scalar(known) is not None
    if not is_known:
        await converge_intent(sessions, payments, payment_intent_id, clock=clock)


async def find(session: AsyncSession, organization_id: str, topup_id: str) -> Topup:
    """One top-up of this organization; raises TopupNotFound."""
    found = await session.scalars(
        select(Topup).where(Topup.organization_id == organization_id, Topup.id == topup_id)
    )
    topup = found.one_or_none()
    if topup is None:
        raise TopupNotFound("This organization has no such top-up.", topup_id=topup_id)
    return topup


async def recent(session: AsyncSession, organization_id: str, limit: int) -> list[Topup]:
    """An organization's latest top-ups, newest first."""
    found = await session.scalars(
        select(Topup)
        .where(Topup.organization_id == organization_id)
        .order_by(Topup.created_at.desc(), Topup.id.desc())
        .limit(limit)
    )
    return list(found)


async def lock_by_intent(session: AsyncSession, payment_intent_id: str | None) -> Topup | None:
    """The top-up that a payment of Stripe's belongs to, locked; None for foreign payments."""
    if payment_intent_id is None:  # and not the top-ups that nobody has paid yet
        return None
    found = await session.scalars(
        select(Topup).where(Topup.payment_intent_id == payment_intent_id).with_for_update()
    )
    return found.one_or_none()


async def _lock(session: AsyncSession, topup_id: str | None) -> Topup | None:
    if topup_id is None:
        return None
    found: Topup | None = await session.get(Topup, topup_id, with_for_update=True)
    return found


async def _pay(
    session: AsyncSession,
    topup: Topup,
    intent: Intent,
    checkout: Checkout | None,
    *,
    clock: Clock,
) -> None:
    """Our own amount becomes credit, provided that it is what was paid."""
    paid = [(intent.amount_cents, intent.currency)]
    if checkout is not None:
        paid.append((checkout.amount_subtotal or 0, checkout.currency or ""))
    if any(amount != (topup.amount_cents, "usd") for amount in paid):
        raise PaymentMismatch("Not the amount that was asked for.", topup_id=topup.id)
    await ledger.post(
        session,
        key=f"pi:{intent.id}",
        kind="topup",
        organization_id=topup.organization_id,
        postings=[
            Posting(chart.customer(topup.organization_id), topup.amount_nano_usd),
            Posting(chart.STRIPE_CLEARING, -topup.amount_nano_usd),
        ],
        actor="stripe",
        memo="Top-up" if topup.kind == "checkout" else "Automatic recharge",
        lot_kind="paid",
        clock=clock,
    )
    topup.payment_intent_id = intent.id
    topup.receipt_url = intent.receipt_url
    topup.failure = None
    if checkout is not None:
        topup.session_id = checkout.id
    _move(topup, "paid", clock)
    await payment_mail.promise(
        session, "receipt", topup.organization_id, about=topup.id, clock=clock
    )


def _after_success(
    profile: PaymentProfile, topup: Topup, intent: Intent, card_label: str | None
) -> None:
    if topup.kind == "recharge":
        profile.failed_recharges = 0
    if card_label is not None:
        profile.payment_method_id = intent.payment_method_id
        profile.card_label = card_label


def _move(topup: Topup, state: str, clock: Clock) -> None:
    topup.state = state
    topup.updated_at = clock()
