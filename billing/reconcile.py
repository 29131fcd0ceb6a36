"""Proof, from the tables alone, that the books are right. Runs hourly in production.

Each check is one query that finds what breaks one law; nothing found is the proof.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, ScalarSelect, and_, case, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import Select

from accounts.models import Organization
from billing import chart
from billing.book_writer import HOUR_COUNTERS, NO_KEY, US_PER_HOUR
from billing.models import (
    Balance,
    CreditLot,
    HoldRecord,
    LedgerEntry,
    LedgerTransaction,
    LotUse,
    UsageHour,
    UsageRecord,
)
from billing.payment_models import NANO_USD_PER_CENT, Dispute, Refund, Topup

EXAMPLES = 3
"""Findings that a failed check names."""

POSTED = func.coalesce(Balance.posted_nano_usd, 0)


@dataclass(frozen=True, slots=True)
class Check:
    """One law of the books, and whether it holds."""

    name: str
    is_ok: bool
    detail: str


async def reconcile(session: AsyncSession) -> list[Check]:
    """Every check. Each is one statement, so each sees the books at one moment."""
    return [await check(session) for check in CHECKS]


async def transactions_sum_to_zero(session: AsyncSession) -> Check:
    """Double entry: what one account gets, others give."""
    query = (
        select(LedgerTransaction.id, func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .outerjoin(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .group_by(LedgerTransaction.id)
        .having(
            or_(
                func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0) != 0,
                func.count(LedgerEntry.line) == 0,
            )
        )
    )
    return await _nothing_found(session, "every transaction sums to zero", query)


async def customers_are_their_own(session: AsyncSession) -> Check:
    """A transaction moves the credit of its own organization and of no other."""
    account = literal(chart.CUSTOMER_PREFIX).op("||")(LedgerTransaction.organization_id)
    query = (
        select(LedgerTransaction.id, LedgerEntry.amount_nano_usd)
        .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .where(
            LedgerEntry.account.startswith(chart.CUSTOMER_PREFIX), LedgerEntry.account != account
        )
    )
    return await _nothing_found(session, "transactions move their own customer's credit", query)


async def balances_equal_entries(session: AsyncSession) -> Check:
    """The projection of each balance is what the ledger says."""
    account = literal(chart.CUSTOMER_PREFIX).op("||")(Organization.id)
    entered = (
        select(func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .where(LedgerEntry.account == account)
        .correlate(Organization)
        .scalar_subquery()
    )
    query = (
        select(Organization.id, POSTED - entered)
        .outerjoin(Balance, Balance.organization_id == Organization.id)
        .where(entered != POSTED)
    )
    return await _nothing_found(session, "balances equal the ledger", query)


async def held_equals_open_holds(session: AsyncSession) -> Check:
    """What a balance says is held is held by open holds."""
    open_holds = (
        select(func.coalesce(func.sum(HoldRecord.amount_nano_usd), 0))
        .where(HoldRecord.organization_id == Organization.id, HoldRecord.state == "open")
        .correlate(Organization)
        .scalar_subquery()
    )
    held = func.coalesce(Balance.held_nano_usd, 0)
    query = (
        select(Organization.id, held - open_holds)
        .outerjoin(Balance, Balance.organization_id == Organization.id)
        .where(held != open_holds)
    )
    return await _nothing_found(session, "held equals the open holds", query)


async def usage_equals_revenue(session: AsyncSession) -> Check:
    """What requests cost is what was earned, or given up as promotion."""
    earned = (
        select(func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(
            LedgerTransaction.organization_id == Organization.id,
            LedgerEntry.account.in_([chart.REVENUE, chart.PROMOTIONAL_CONTRA]),
        )
        .correlate(Organization)
        .scalar_subquery()
    )
    used = (
        select(func.coalesce(func.sum(UsageRecord.charge_nano_usd), 0))
        .where(UsageRecord.organization_id == Organization.id)
        .correlate(Organization)
        .scalar_subquery()
    )
    query = select(Organization.id, earned - used).where(earned != used)
    return await _nothing_found(session, "usage equals revenue and promotion", query)


async def hours_equal_usage(session: AsyncSession) -> Check:
    """The hourly sums are the sums of the records: requests, tokens and charges."""
    hourly = select(
        UsageHour.organization_id,
        UsageHour.api_key_id,
        UsageHour.model,
        UsageHour.hour,
        *(getattr(UsageHour, counter).label(counter) for counter in HOUR_COUNTERS),
    )
    records = select(
        UsageRecord.organization_id,
        func.coalesce(UsageRecord.api_key_id, NO_KEY),
        UsageRecord.model,
        UsageRecord.created_at // US_PER_HOUR,
        literal(-1),
        *(-getattr(UsageRecord, counter) for counter in HOUR_COUNTERS[1:]),
    )
    both = hourly.union_all(records).subquery()
    sums = [func.abs(func.sum(both.c[counter])) for counter in HOUR_COUNTERS]
    difference = sums[0] + sums[1] + sums[2] + sums[3] + sums[4]
    query = (
        select(both.c.organization_id, difference)
        .group_by(both.c.organization_id, both.c.api_key_id, both.c.model, both.c.hour)
        .having(difference != 0)
    )
    return await _nothing_found(session, "hourly usage equals the records", query)


async def lots_equal_balances(session: AsyncSession) -> Check:
    """What is left of the lots is the posted balance, or nothing where that is negative."""
    left = (
        select(func.coalesce(func.sum(CreditLot.remaining_nano_usd), 0))
        .where(CreditLot.organization_id == Organization.id)
        .correlate(Organization)
        .scalar_subquery()
    )
    expected = case((POSTED > 0, POSTED), else_=0)
    query = (
        select(Organization.id, left - expected)
        .outerjoin(Balance, Balance.organization_id == Organization.id)
        .where(left != expected)
    )
    return await _nothing_found(session, "credit lots equal the balances", query)


async def lots_equal_their_uses(session: AsyncSession) -> Check:
    """Of each lot, what was used and what is left make up the whole."""
    used = (
        select(func.coalesce(func.sum(LotUse.amount_nano_usd), 0))
        .where(LotUse.lot_id == CreditLot.id)
        .correlate(CreditLot)
        .scalar_subquery()
    )
    difference = CreditLot.amount_nano_usd - CreditLot.remaining_nano_usd - used
    query = select(CreditLot.id, difference).where(difference != 0)
    return await _nothing_found(session, "credit lots equal their uses", query)


async def closed_holds_have_usage(session: AsyncSession) -> Check:
    """Each closed hold has its one record, with the same charge; no open one has any."""
    charge = func.coalesce(HoldRecord.charge_nano_usd, -1)
    is_wrong = or_(
        and_(HoldRecord.state != "open", UsageRecord.request_id.is_(None)),
        and_(HoldRecord.state == "open", UsageRecord.request_id.is_not(None)),
        and_(UsageRecord.request_id.is_not(None), UsageRecord.charge_nano_usd != charge),
    )
    query = (
        select(HoldRecord.request_id, charge)
        .outerjoin(UsageRecord, UsageRecord.request_id == HoldRecord.request_id)
        .where(is_wrong)
    )
    return await _nothing_found(session, "every closed hold has its usage record", query)


async def charges_have_transactions(session: AsyncSession) -> Check:
    """Each charged request has its one ledger transaction of that amount."""
    taken = (
        select(func.coalesce(-func.sum(LedgerEntry.amount_nano_usd), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(
            LedgerTransaction.key == literal("usage:").op("||")(UsageRecord.request_id),
            LedgerEntry.account
            == literal(chart.CUSTOMER_PREFIX).op("||")(UsageRecord.organization_id),
        )
        .correlate(UsageRecord)
        .scalar_subquery()
    )
    query = select(UsageRecord.request_id, UsageRecord.charge_nano_usd - taken).where(
        UsageRecord.charge_nano_usd != taken
    )
    return await _nothing_found(session, "every charge is in the ledger once", query)


async def clearing_equals_payments(session: AsyncSession) -> Check:
    """What Stripe holds for a customer: paid in, less refunds and what disputes have withdrawn."""
    cleared = (
        select(-func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(
            LedgerTransaction.organization_id == Organization.id,
            LedgerEntry.account == chart.STRIPE_CLEARING,
        )
        .correlate(Organization)
        .scalar_subquery()
    )
    paid = _cents_of(Topup, Topup.state == "paid")
    refunded = _cents_of(Refund, Refund.state != "failed")
    withdrawn = _cents_of(Dispute, Dispute.is_withdrawn)
    expected = (paid - refunded - withdrawn) * NANO_USD_PER_CENT
    query = select(Organization.id, cleared - expected).where(cleared != expected)
    return await _nothing_found(session, "the clearing account equals the payments", query)


CHECKS: tuple[Callable[[AsyncSession], Awaitable[Check]], ...] = (
    transactions_sum_to_zero,
    customers_are_their_own,
    balances_equal_entries,
    held_equals_open_holds,
    usage_equals_revenue,
    hours_equal_usage,
    lots_equal_balances,
    lots_equal_their_uses,
    closed_holds_have_usage,
    charges_have_transactions,
    clearing_equals_payments,
)


def _cents_of(
    table: type[Topup | Refund | Dispute],
    condition: ColumnElement[bool] | InstrumentedAttribute[bool],
) -> ScalarSelect[int]:
    return (
        select(func.coalesce(func.sum(table.amount_cents), 0))
        .where(table.organization_id == Organization.id, condition)
        .correlate(Organization)
        .scalar_subquery()
    )


async def _nothing_found(session: AsyncSession, name: str, query: Select[str, int]) -> Check:
    found = (await session.execute(query.limit(EXAMPLES + 1))).all()
    if not found:
        return Check(name, True, "holds")
    shown = ", ".join(f"{row[0]} differs by {row[1]}" for row in found[:EXAMPLES])
    return Check(name, False, shown + (" and more" if len(found) > EXAMPLES else ""))
