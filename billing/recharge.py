"""Automatic recharge: the saved card is charged when the balance falls below a threshold.

Off unless its owner switched it on. At most one attempt at a time (a unique index), one a minute, so
much a month; the third failure in a row, and the first that needs the card's owner, switch it off.
The attempt's row is committed before the call and names it, so that a call whose answer was lost is
repeated and never doubled.
"""

from datetime import UTC

import structlog
from sqlalchemy import exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.models import Organization
from billing import payment_mail, topups
from billing.errors import CardDeclined, PaymentRefused, PaymentsUnavailable
from billing.models import Balance
from billing.money import NANO_PER_DOLLAR
from billing.payment_models import OPEN_STATES, PaymentProfile, Topup
from billing.payment_profiles import find_profile
from billing.stripe_client import AUTHENTICATION_REQUIRED, Payments
from common.clock import MICROSECONDS_PER_SECOND, Clock, to_datetime, utc_now_us
from common.db import Sessions, read_only
from common.ids import new_id

logger = structlog.get_logger(__name__)

COOLDOWN_S = 60
RETRY_AFTER_S = 30
SEARCH_AFTER_S = 300
"""A call that fails for so long may have been answered with an error that Stripe repeats."""
SAME_KEY_S = 23 * 3_600
"""Stripe may forget an idempotency key after 24 hours."""
MAX_FAILURES = 3
MAX_PER_RUN = 100
SHORTAGE_NANO_USD = NANO_PER_DOLLAR // 10
"""Whatever the threshold: with less than that left, an answer may be waiting for credit."""
COUNTED = (*OPEN_STATES, "paid")
"""States of recharges that count towards the month's limit."""


async def run_due(sessions: Sessions, payments: Payments, *, clock: Clock = utc_now_us) -> int:
    """Charge every card that is due, and repeat what was left open; returns how many calls."""
    async with read_only(sessions) as session:
        organization_ids = await _due(session)
        open_ids = await _left_open(session, clock())
    for organization_id in organization_ids:
        async with sessions.begin() as session:
            topup = await begin(session, organization_id, clock=clock)
        if topup is not None:
            open_ids.append(topup.id)
    for topup_id in open_ids:
        await attempt(sessions, payments, topup_id, clock=clock)
    return len(open_ids)


async def attempt(
    sessions: Sessions, payments: Payments, topup_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Charge the card for one recharge; safe to repeat, whatever became of the last try."""
    async with sessions.begin() as session:
        topup = await session.get_one(Topup, topup_id, with_for_update=True)
        if topup.state != "pending":
            return
        profile = await find_profile(session, topup.organization_id)
        topup.updated_at = clock()
    assert profile is not None
    age_s = (clock() - topup.created_at) // MICROSECONDS_PER_SECOND
    if age_s > SAME_KEY_S:
        await _find_or_stop(sessions, payments, topup_id, is_final=True, clock=clock)
        return
    try:
        if profile.customer_id is None or profile.payment_method_id is None:
            raise PaymentRefused("The card was removed.", reason="card_removed")
        intent = await payments.charge_saved_card(
            topup_id,
            amount_cents=topup.amount_cents,
            customer_id=profile.customer_id,
            payment_method_id=profile.payment_method_id,
        )
    except CardDeclined as declined:
        await _fail(sessions, topup_id, declined.facts["reason"], clock=clock)
        await _cancel(payments, declined.facts["payment_intent_id"])
    except PaymentRefused as refused:
        await _fail(sessions, topup_id, refused.facts["reason"], clock=clock)
    except PaymentsUnavailable:
        if age_s > SEARCH_AFTER_S:
            await _find_or_stop(sessions, payments, topup_id, is_final=False, clock=clock)
    else:
        await topups.apply_intent(sessions, payments, intent, clock=clock)
        if intent.status not in ("succeeded", "processing"):
            await _fail(sessions, topup_id, intent.failure or intent.status, clock=clock)
            await _cancel(payments, intent.id)


async def _due(session: AsyncSession) -> list[str]:
    """Organizations below their threshold with a card, recharge on, and no recharge open.

    A running answer takes what is left before it waits for more; so a shortage shows in the balance.
    """
    available = Balance.posted_nano_usd - Balance.held_nano_usd
    is_open = exists().where(
        Topup.organization_id == PaymentProfile.organization_id,
        Topup.kind == "recharge",
        Topup.state.in_(OPEN_STATES),
    )
    found = await session.scalars(
        select(PaymentProfile.organization_id)
        .join(Balance, Balance.organization_id == PaymentProfile.organization_id)
        .join(Organization, Organization.id == PaymentProfile.organization_id)
        .where(
            PaymentProfile.is_recharge_on,
            PaymentProfile.payment_method_id.is_not(None),
            Organization.status == "active",
            or_(
                available < PaymentProfile.recharge_threshold_nano_usd,
                available < SHORTAGE_NANO_USD,
            ),
            ~is_open,
        )
        .order_by(PaymentProfile.organization_id)
        .limit(MAX_PER_RUN)
    )
    return list(found)


async def _left_open(session: AsyncSession, now_us: int) -> list[str]:
    found = await session.scalars(
        select(Topup.id)
        .where(
            Topup.kind == "recharge",
            Topup.state == "pending",
            Topup.updated_at < now_us - RETRY_AFTER_S * MICROSECONDS_PER_SECOND,
        )
        .order_by(Topup.created_at)
        .limit(MAX_PER_RUN)
    )
    return list(found)


async def begin(
    session: AsyncSession, organization_id: str, *, clock: Clock = utc_now_us
) -> Topup | None:
    """The row of a new attempt, under the profile's lock; None when it is not to be."""
    profile = await find_profile(session, organization_id, is_locked=True)
    if profile is None or not profile.is_recharge_on:
        return None
    now = clock()
    newest = await session.scalar(
        select(func.max(Topup.created_at)).where(
            Topup.organization_id == organization_id, Topup.kind == "recharge"
        )
    )
    if newest is not None and now - newest < COOLDOWN_S * MICROSECONDS_PER_SECOND:
        return None
    charged = await charged_this_month(session, organization_id, now)
    if charged + profile.recharge_cents > profile.recharge_month_cap_cents:
        return None
    return await topups.start(
        session,
        organization_id,
        amount_cents=profile.recharge_cents,
        idempotency_key=new_id("recharge"),
        kind="recharge",
        clock=clock,
    )


async def charged_this_month(session: AsyncSession, organization_id: str, now_us: int) -> int:
    """Cents that recharges of this UTC month have charged or may still charge."""
    month = to_datetime(now_us).astimezone(UTC).replace(day=1, hour=0, minute=0, second=0)
    since_us = int(month.replace(microsecond=0).timestamp()) * MICROSECONDS_PER_SECOND
    total = await session.scalar(
        select(func.coalesce(func.sum(Topup.amount_cents), 0)).where(
            Topup.organization_id == organization_id,
            Topup.kind == "recharge",
            Topup.state.in_(COUNTED),
            Topup.created_at >= since_us,
        )
    )
    return int(total or 0)


async def _fail(sessions: Sessions, topup_id: str, reason: str, *, clock: Clock) -> None:
    """Note a failure, tell the owner, and switch off what must not go on by itself."""
    async with sessions.begin() as session:
        topup = await session.get_one(Topup, topup_id, with_for_update=True)
        if topup.state not in OPEN_STATES:
            return
        topup.state, topup.failure, topup.updated_at = "failed", reason, clock()
        profile = await find_profile(session, topup.organization_id, is_locked=True)
        assert profile is not None
        profile.failed_recharges += 1
        if reason == AUTHENTICATION_REQUIRED or profile.failed_recharges >= MAX_FAILURES:
            profile.is_recharge_on, profile.paused_because = False, reason
        await payment_mail.promise(
            session, "recharge_failed", topup.organization_id, about=topup_id, clock=clock
        )


async def _cancel(payments: Payments, payment_intent_id: str | None) -> None:
    """A declined payment must not succeed later by itself. If it has, its webhook says so."""
    if payment_intent_id is None:
        return
    try:
        await payments.cancel_intent(payment_intent_id)
    except (PaymentRefused, PaymentsUnavailable) as error:
        logger.warning("payment_not_canceled", payment_intent=payment_intent_id, error=error.code)


async def _find_or_stop(
    sessions: Sessions, payments: Payments, topup_id: str, *, is_final: bool, clock: Clock
) -> None:
    """Look for the payment that may have been made; in the end, leave it to a person."""
    try:
        intents = await payments.find_intents(topup_id)
    except PaymentsUnavailable:
        return
    for intent in intents:
        await topups.apply_intent(sessions, payments, intent, clock=clock)
    if not intents and is_final:
        async with sessions.begin() as session:
            topup = await session.get_one(Topup, topup_id, with_for_update=True)
            if topup.state == "pending":
                topup.state, topup.failure, topup.updated_at = "review", "no_answer", clock()
        logger.error("recharge_needs_review", topup=topup_id)
