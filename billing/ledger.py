"""The ledger: double-entry, append-only. The only way that a balance changes outside of usage.

Locks are taken in one order everywhere: holds, then balances, then what hangs on a balance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import CursorResult, case, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import audit
from accounts.organizations import find_organization
from billing import chart
from billing.errors import InvalidAmount, LedgerConflict
from billing.lots import LotKind, OpenLot, Use, load_open_lots, use
from billing.models import Balance as BalanceRecord
from billing.models import CreditLot, LedgerEntry, LedgerTransaction, LotUse
from billing.money import MAX_NANO_USD
from common.clock import Clock, utc_now_us
from common.ids import new_id
from common.upsert import insert_or_ignore


@dataclass(frozen=True, slots=True)
class Posting:
    """One amount on one account; positive adds to what a customer has."""

    account: str
    amount_nano_usd: int


@dataclass(frozen=True, slots=True)
class Balance:
    """An organization's money in nano-dollars. `promotional + paid == posted`."""

    posted: int
    held: int
    promotional: int

    @property
    def paid(self) -> int:
        """What is left of bought credit; negative when more was taken back than was there."""
        return self.posted - self.promotional

    @property
    def available(self) -> int:
        """What new requests may still spend."""
        return self.posted - self.held


async def open_balance(session: AsyncSession, organization_id: str) -> None:
    """Give an organization a balance of zero, if it has none."""
    await insert_or_ignore(
        session,
        BalanceRecord,
        {"organization_id": organization_id, "posted_nano_usd": 0, "held_nano_usd": 0},
    )


async def balance(session: AsyncSession, organization_id: str) -> Balance:
    """What an organization has, holds and may spend; zeros when it never had any."""
    not_bought = case((CreditLot.kind != "paid", CreditLot.remaining_nano_usd), else_=0)
    promotional = (
        select(func.coalesce(func.sum(not_bought), 0))
        .where(CreditLot.organization_id == organization_id)
        .scalar_subquery()
    )
    found = await session.execute(
        select(BalanceRecord.posted_nano_usd, BalanceRecord.held_nano_usd, promotional).where(
            BalanceRecord.organization_id == organization_id
        )
    )
    row = found.one_or_none()
    if row is None:
        return Balance(posted=0, held=0, promotional=0)
    return Balance(posted=row[0], held=row[1], promotional=int(row[2]))


async def post(
    session: AsyncSession,
    *,
    key: str,
    kind: str,
    organization_id: str,
    postings: Sequence[Posting],
    actor: str,
    memo: str,
    lot_kind: LotKind = "paid",
    expires_at: int | None = None,
    is_paid_used_first: bool = False,
    lot_id: str | None = None,
    clock: Clock = utc_now_us,
) -> LedgerTransaction:
    """Write one transaction and bring balance and lots along; raises LedgerConflict.

    `key` names the real-world cause (`grant:signup:…`, `pi:…`): posting the same again returns the
    first transaction and changes nothing. Credit to the customer becomes a lot of `lot_kind` that
    ends at `expires_at`; credit from the customer is taken as usage takes it, or bought credit
    first, or from the one lot `lot_id`.
    """
    _require_balanced(organization_id, postings)
    now = clock()
    transaction = LedgerTransaction(
        id=new_id("txn"),
        key=key,
        kind=kind,
        organization_id=organization_id,
        actor=actor,
        memo=memo,
        created_at=now,
    )
    columns = LedgerTransaction.__table__.columns.keys()
    values = {name: getattr(transaction, name) for name in columns}
    if not await insert_or_ignore(session, LedgerTransaction, values):
        return await _replay(session, key, kind, organization_id, postings)
    session.add_all(
        LedgerEntry(
            transaction_id=transaction.id,
            line=line,
            account=posting.account,
            amount_nano_usd=posting.amount_nano_usd,
        )
        for line, posting in enumerate(postings)
    )
    await session.flush()
    amount = sum(
        p.amount_nano_usd for p in postings if p.account == chart.customer(organization_id)
    )
    posted = await _move_balance(session, organization_id, amount)
    if amount > 0:
        await _add_lot(session, transaction, amount, posted, lot_kind, expires_at)
    elif amount < 0:
        lots = await load_open_lots(session, organization_id)
        if is_paid_used_first:
            lots.sort(key=lambda lot: not lot.is_paid)
        if lot_id is not None:
            lots = [lot for lot in lots if lot.id == lot_id]
        await _use_lots(session, transaction.id, lots, -amount)
    return await session.get_one(LedgerTransaction, transaction.id)


async def adjust_credit(
    session: AsyncSession,
    organization_id: str,
    amount: int,
    *,
    reason: str,
    actor: str,
    key: str,
    clock: Clock = utc_now_us,
) -> LedgerTransaction:
    """Give (positive) or take (negative) credit: an entry with a reason, never an edit.

    Taking may bring the balance below zero; then nothing runs until it is above again. Raises
    InvalidAmount, OrganizationNotFound, and LedgerConflict when `key` named another adjustment.
    """
    if not reason.strip():
        raise InvalidAmount("An adjustment needs a reason.")
    await find_organization(session, organization_id)
    transaction = await post(
        session,
        key=f"adjustment:{key}",
        kind="adjustment",
        organization_id=organization_id,
        postings=[
            Posting(chart.customer(organization_id), amount),
            Posting(chart.ADJUSTMENTS, -amount),
        ],
        actor=actor,
        memo=reason.strip(),
        lot_kind="goodwill",
        clock=clock,
    )
    await audit.record(
        session,
        "credit.adjusted",
        organization_id=organization_id,
        target=transaction.id,
        amount_nano_usd=amount,
        reason=reason.strip(),
        actor=actor,
        clock=clock,
    )
    return transaction


async def entries(
    session: AsyncSession, organization_id: str, limit: int
) -> list[tuple[LedgerTransaction, int]]:
    """An organization's latest transactions and what each did to its credit, newest first."""
    found = await session.execute(
        select(LedgerTransaction, LedgerEntry.amount_nano_usd)
        .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .where(
            LedgerTransaction.organization_id == organization_id,
            LedgerEntry.account == chart.customer(organization_id),
        )
        .order_by(LedgerTransaction.created_at.desc(), LedgerTransaction.id.desc())
        .limit(limit)
    )
    return [(transaction, amount) for transaction, amount in found]


def _require_balanced(organization_id: str, postings: Sequence[Posting]) -> None:
    customers = {chart.customer(organization_id)}
    for posting in postings:
        if posting.amount_nano_usd == 0 or abs(posting.amount_nano_usd) > MAX_NANO_USD:
            raise InvalidAmount("An amount is not zero and fits 64 bits.")
        is_customer = posting.account.startswith(chart.CUSTOMER_PREFIX)
        assert not is_customer or posting.account in customers, "one customer per transaction"
    # Not an assert: this law must hold under `python -O` too.
    if not postings or sum(posting.amount_nano_usd for posting in postings) != 0:
        raise InvalidAmount("The postings of a transaction sum to zero.")


async def _replay(
    session: AsyncSession,
    key: str,
    kind: str,
    organization_id: str,
    postings: Sequence[Posting],
) -> LedgerTransaction:
    """The transaction of `key`, provided that it is the same one."""
    first = (
        await session.scalars(select(LedgerTransaction).where(LedgerTransaction.key == key))
    ).one()
    stored = await session.execute(
        select(LedgerEntry.account, LedgerEntry.amount_nano_usd)
        .where(LedgerEntry.transaction_id == first.id)
        .order_by(LedgerEntry.line)
    )
    is_same = (first.kind, first.organization_id) == (kind, organization_id) and [
        Posting(account, amount) for account, amount in stored
    ] == list(postings)
    if not is_same:
        raise LedgerConflict("This key belongs to another transaction.", key=key)
    return first


async def _move_balance(session: AsyncSession, organization_id: str, amount: int) -> int:
    """Add to the posted balance and lock it; returns what it is now."""
    await open_balance(session, organization_id)
    posted = await session.scalar(
        update(BalanceRecord)
        .where(BalanceRecord.organization_id == organization_id)
        .values(posted_nano_usd=BalanceRecord.posted_nano_usd + amount)
        .returning(BalanceRecord.posted_nano_usd)
        .execution_options(synchronize_session=False)
    )
    assert posted is not None
    return posted


async def _add_lot(
    session: AsyncSession,
    transaction: LedgerTransaction,
    amount: int,
    posted: int,
    kind: LotKind,
    expires_at: int | None,
) -> None:
    """A new lot; what a balance below zero swallowed of it is used up at once."""
    lot = OpenLot(
        id=new_id("lot"),
        organization_id=transaction.organization_id,
        kind=kind,
        remaining_nano_usd=amount,
        expires_at=expires_at,
        created_at=transaction.created_at,
    )
    session.add(
        CreditLot(
            id=lot.id,
            organization_id=lot.organization_id,
            kind=kind,
            amount_nano_usd=amount,
            remaining_nano_usd=amount,
            expires_at=expires_at,
            transaction_id=transaction.id,
            created_at=lot.created_at,
        )
    )
    await session.flush()
    swallowed = amount - max(0, min(amount, posted))
    await _use_lots(session, transaction.id, [lot], swallowed)


async def _use_lots(
    session: AsyncSession, transaction_id: str, lots: list[OpenLot], amount: int
) -> list[Use]:
    uses = use(lots, amount)
    for part in uses:
        result = cast(
            CursorResult[Any],
            await session.execute(
                update(CreditLot)
                .where(CreditLot.id == part.lot_id)
                .values(remaining_nano_usd=CreditLot.remaining_nano_usd - part.amount_nano_usd)
                .execution_options(synchronize_session=False)
            ),
        )
        assert result.rowcount == 1
        session.add(
            LotUse(
                transaction_id=transaction_id,
                lot_id=part.lot_id,
                amount_nano_usd=part.amount_nano_usd,
            )
        )
    await session.flush()
    return uses
