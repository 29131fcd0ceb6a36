"""Who an organization is at Stripe, and the card that it has saved there."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from billing.errors import InvalidAmount, PaymentRefused
from billing.payment_models import NANO_USD_PER_CENT, PaymentProfile
from billing.stripe_client import Payments
from common.clock import Clock, utc_now_us
from common.db import Sessions
from common.upsert import insert_or_ignore

DEFAULT_THRESHOLD_CENTS = 1_000
DEFAULT_RECHARGE_CENTS = 2_500
DEFAULT_MONTH_CAP_CENTS = 10_000
MIN_RECHARGE_CENTS = 500
MAX_RECHARGE_CENTS = 500_000
MAX_CAP_CENTS = 100_000_000


async def find_profile(
    session: AsyncSession, organization_id: str, *, is_locked: bool = False
) -> PaymentProfile | None:
    """The organization's profile, once it has paid or tried to."""
    query = select(PaymentProfile).where(PaymentProfile.organization_id == organization_id)
    if is_locked:
        query = query.with_for_update()
    return (await session.scalars(query)).one_or_none()


async def ensure_profile(
    session: AsyncSession, organization_id: str, *, clock: Clock = utc_now_us
) -> PaymentProfile:
    """The profile, locked; made with automatic recharge off if there is none."""
    values = {
        "organization_id": organization_id,
        "is_recharge_on": False,
        "recharge_threshold_nano_usd": DEFAULT_THRESHOLD_CENTS * NANO_USD_PER_CENT,
        "recharge_cents": DEFAULT_RECHARGE_CENTS,
        "recharge_month_cap_cents": DEFAULT_MONTH_CAP_CENTS,
        "failed_recharges": 0,
        "created_at": clock(),
    }
    await insert_or_ignore(session, PaymentProfile, values)
    profile = await find_profile(session, organization_id, is_locked=True)
    assert profile is not None
    return profile


async def ensure_customer(
    sessions: Sessions, payments: Payments, organization_id: str, *, email: str
) -> str:
    """The organization's customer at Stripe: the row first, so that a double click makes one."""
    async with sessions.begin() as session:
        profile = await ensure_profile(session, organization_id)
        customer_id = profile.customer_id
    if customer_id is not None:
        return customer_id
    customer_id = await payments.create_customer(organization_id, email=email)
    async with sessions.begin() as session:
        profile = await ensure_profile(session, organization_id)
        profile.customer_id = profile.customer_id or customer_id
        return profile.customer_id


async def set_recharge(
    session: AsyncSession,
    organization_id: str,
    *,
    is_on: bool,
    threshold_cents: int,
    amount_cents: int,
    month_cap_cents: int,
    clock: Clock = utc_now_us,
) -> PaymentProfile:
    """Switch automatic recharge; raises InvalidAmount, and PaymentRefused without a saved card."""
    if not MIN_RECHARGE_CENTS <= amount_cents <= MAX_RECHARGE_CENTS:
        raise InvalidAmount("A recharge is $5 at least and $5,000 at most.", field="amount")
    if not 0 <= threshold_cents <= MAX_CAP_CENTS:
        raise InvalidAmount(
            "The threshold is $0 at least and $1,000,000 at most.", field="threshold"
        )
    if not amount_cents <= month_cap_cents <= MAX_CAP_CENTS:
        raise InvalidAmount("The monthly limit covers one recharge at least.", field="month_cap")
    profile = await ensure_profile(session, organization_id, clock=clock)
    if is_on and profile.payment_method_id is None:
        raise PaymentRefused("Save a card with a top-up first.", reason="no_card")
    profile.is_recharge_on = is_on
    profile.recharge_threshold_nano_usd = threshold_cents * NANO_USD_PER_CENT
    profile.recharge_cents = amount_cents
    profile.recharge_month_cap_cents = month_cap_cents
    profile.failed_recharges = 0
    profile.paused_because = None
    await session.flush()
    return profile


async def forget_card(session: AsyncSession, payment_method_id: str) -> None:
    """A card that was detached at Stripe can no longer be charged."""
    found = await session.scalars(
        select(PaymentProfile)
        .where(PaymentProfile.payment_method_id == payment_method_id)
        .with_for_update()
    )
    for profile in found:
        _forget(profile)


async def forget_customer(session: AsyncSession, customer_id: str) -> None:
    """A customer that was deleted at Stripe; the next top-up makes another one."""
    found = await session.scalars(
        select(PaymentProfile).where(PaymentProfile.customer_id == customer_id).with_for_update()
    )
    for profile in found:
        profile.customer_id = None
        _forget(profile)


def _forget(profile: PaymentProfile) -> None:
    profile.payment_method_id = None
    profile.card_label = None
    if profile.is_recharge_on:
        profile.is_recharge_on = False
        profile.paused_because = "card_removed"
