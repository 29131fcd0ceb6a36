"""Proof, from the tables alone, that the books are right. Runs hourly in production.

Each check is one query that finds what breaks one law; nothing found is the proof.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy import and_, case, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Select

from billing import chart
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

EXAMPLES = 3
"""Findings that a failed check names."""


@dataclass(frozen=True, slots=True)
class Check:
    """One law of the books, and whether it holds."""

    name: str
    is_ok: bool
    detail: str


async def reconcile(session: AsyncSession) -> list[Check]:
    """Every check, in one snapshot where the caller's transaction gives one."""
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


async def balances_equal_entries(session: AsyncSession) -> Check:
    """The projection of each balance is what the ledger says."""
    account = literal(chart.CUSTOMER_PREFIX).op("||")(Balance.organization_id)
    posted = (
        select(func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .where(LedgerEntry.account == account)
        .correlate(Balance)
        .scalar_subquery()
    )
    query = select(Balance.organization_id, Balance.posted_nano_usd - posted).where(
        Balance.posted_nano_usd != posted
    )
    return await _nothing_found(session, "balances equal the ledger", query)


async def held_equals_open_holds(session: AsyncSession) -> Check:
    """What a balance says is held is held by open holds."""
    held = (
        select(func.coalesce(func.sum(HoldRecord.amount_nano_usd), 0))
        .where(HoldRecord.organization_id == Balance.organization_id, HoldRecord.state == "open")
        .correlate(Balance)
        .scalar_subquery()
    )
    query = select(Balance.organization_id, Balance.held_nano_usd - held).where(
        Balance.held_nano_usd != held
    )
    return await _nothing_found(session, "held equals the open holds", query)


async def usage_equals_revenue(session: AsyncSession) -> Check:
    """What requests cost is what was earned, or given up as promotion."""
    earned = (
        select(func.coalesce(func.sum(LedgerEntry.amount_nano_usd), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(
            LedgerTransaction.organization_id == Balance.organization_id,
            LedgerEntry.account.in_([chart.REVENUE, chart.PROMOTIONAL_CONTRA]),
        )
        .correlate(Balance)
        .scalar_subquery()
    )
    used = (
        select(func.coalesce(func.sum(UsageRecord.charge_nano_usd), 0))
        .where(UsageRecord.organization_id == Balance.organization_id)
        .correlate(Balance)
        .scalar_subquery()
    )
    query = select(Balance.organization_id, earned - used).where(earned != used)
    return await _nothing_found(session, "usage equals revenue and promotion", query)


async def hours_equal_usage(session: AsyncSession) -> Check:
    """The hourly sums are the sums of the records."""
    hourly = (
        select(func.coalesce(func.sum(UsageHour.charge_nano_usd), 0))
        .where(UsageHour.organization_id == Balance.organization_id)
        .correlate(Balance)
        .scalar_subquery()
    )
    used = (
        select(func.coalesce(func.sum(UsageRecord.charge_nano_usd), 0))
        .where(UsageRecord.organization_id == Balance.organization_id)
        .correlate(Balance)
        .scalar_subquery()
    )
    query = select(Balance.organization_id, hourly - used).where(hourly != used)
    return await _nothing_found(session, "hourly usage equals the records", query)


async def lots_equal_balances(session: AsyncSession) -> Check:
    """What is left of the lots is the posted balance, or nothing where that is negative."""
    left = (
        select(func.coalesce(func.sum(CreditLot.remaining_nano_usd), 0))
        .where(CreditLot.organization_id == Balance.organization_id)
        .correlate(Balance)
        .scalar_subquery()
    )
    expected = case((Balance.posted_nano_usd > 0, Balance.posted_nano_usd), else_=0)
    query = select(Balance.organization_id, left - expected).where(left != expected)
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


CHECKS: tuple[Callable[[AsyncSession], Awaitable[Check]], ...] = (
    transactions_sum_to_zero,
    balances_equal_entries,
    held_equals_open_holds,
    usage_equals_revenue,
    hours_equal_usage,
    lots_equal_balances,
    lots_equal_their_uses,
    closed_holds_have_usage,
    charges_have_transactions,
)


async def _nothing_found(session: AsyncSession, name: str, query: Select[str, int]) -> Check:
    found = (await session.execute(query.limit(EXAMPLES + 1))).all()
    if not found:
        return Check(name, True, "holds")
    shown = ", ".join(f"{row[0]} differs by {row[1]} n$" for row in found[:EXAMPLES])
    return Check(name, False, shown + (" and more" if len(found) > EXAMPLES else ""))
