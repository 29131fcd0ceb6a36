"""How a group's decisions reach the tables: all in one round trip, last the guarded balances.

Every UPDATE repeats the condition that its decision rested on, and must change its row. The locks
make a difference impossible; if one were ever missing, the transaction fails instead of overselling.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import BigInteger, ClauseElement, Table, bindparam, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.errors import LedgerConflict
from billing.hold_operations import Hold, Outcome, UsageFacts
from billing.lots import OpenLot, Use
from billing.models import (
    OPEN,
    Balance,
    CreditLot,
    HoldRecord,
    LedgerEntry,
    LedgerTransaction,
    LotUse,
    UsageHour,
    UsageRecord,
)
from common.ids import new_id
from common.round_trip import Call, RowMissed, Statement, commit_together, send_together
from common.upsert import insert_of

HOLD_COLUMNS = tuple(HoldRecord.__table__.c.keys())
US_PER_HOUR = 3_600_000_000
NO_KEY = "session"
"""Stands for the key in `usage_hours` where a logged-in browser used none."""
HOUR_IDENTITY = ("organization_id", "api_key_id", "model")
HOUR_COUNTERS = (
    "requests",
    "uncached_input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "charge_nano_usd",
)
_NO_FLOOR = -(2**62)
ROW_CHANGED = "A guarded update found its row changed."

_CHANGE_HOLD = Statement.of(
    update(cast(Table, HoldRecord.__table__))
    .where(
        HoldRecord.request_id == bindparam("b_request_id"),
        HoldRecord.state == OPEN,
        HoldRecord.epoch == bindparam("b_loaded_epoch"),
    )
    .values(
        amount_nano_usd=bindparam("b_amount_nano_usd"),
        authorized_output_tokens=bindparam("b_authorized_output_tokens"),
        epoch=bindparam("b_epoch"),
        state=bindparam("b_state"),
        charge_nano_usd=bindparam("b_charge_nano_usd"),
        outcome=bindparam("b_outcome"),
        closed_at=bindparam("b_closed_at"),
    )
)
_CHANGE_LOT = Statement.of(
    update(cast(Table, CreditLot.__table__))
    .where(CreditLot.id == bindparam("b_id"))
    .values(remaining_nano_usd=bindparam("b_remaining"))
)
_POSTED = Balance.posted_nano_usd + bindparam("b_posted")
_HELD = Balance.held_nano_usd + bindparam("b_held")
_MOVE_BALANCE = Statement.of(
    update(cast(Table, Balance.__table__))
    .where(
        Balance.organization_id == bindparam("b_organization_id"),
        bindparam("b_floor", type_=BigInteger) <= _POSTED - _HELD,
    )
    .values(posted_nano_usd=_POSTED, held_nano_usd=_HELD)
)
_ADD_HOLD, _ADD_TRANSACTION, _ADD_ENTRY, _ADD_LOT_USE, _ADD_USAGE = (
    Statement.of(insert(cast(Table, table.__table__)))
    for table in (HoldRecord, LedgerTransaction, LedgerEntry, LotUse, UsageRecord)
)


def _adding_to_hour(dialect: str) -> ClauseElement:
    """Add to the counters of an hour, or begin it."""
    statement = insert_of(dialect, UsageHour)
    columns = UsageHour.__table__.c
    return statement.on_conflict_do_update(
        index_elements=[*HOUR_IDENTITY, "hour"],
        set_={name: columns[name] + statement.excluded[name] for name in HOUR_COUNTERS},
    )


_ADD_TO_HOUR = Statement.by_dialect(_adding_to_hour)


@dataclass(slots=True)
class HoldState:
    """A row of `holds` as this transaction sees and changes it."""

    request_id: str
    organization_id: str
    api_key_id: str | None
    model: str
    price_id: str
    gateway: str
    amount_nano_usd: int
    input_tokens: int
    authorized_output_tokens: int
    epoch: int
    state: str
    charge_nano_usd: int | None
    outcome: str | None
    created_at: int
    closed_at: int | None
    loaded_epoch: int = 1
    """What the epoch was when it was loaded; the UPDATE asks for it again."""

    def as_open(self) -> Hold:
        """What its gateway needs to know."""
        return Hold(
            self.request_id, self.epoch, self.authorized_output_tokens, self.amount_nano_usd
        )

    def as_row(self) -> dict[str, Any]:
        """The columns."""
        return {name: getattr(self, name) for name in HOLD_COLUMNS}


@dataclass(frozen=True, slots=True)
class ClosedHold:
    """A hold that this transaction closes: its usage, its postings, the lots that paid."""

    hold: HoldState
    outcome: Outcome
    facts: UsageFacts
    uncached_input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    charge_nano_usd: int = 0
    is_billable: bool = False
    postings: Sequence[tuple[str, int]] = ()
    uses: Sequence[Use] = ()


@dataclass(slots=True)
class _Move:
    posted: int = 0
    held: int = 0
    is_guarded: bool = False


@dataclass(slots=True)
class BookChanges:
    """Everything that a group decided."""

    new_holds: list[HoldState] = field(default_factory=list)
    changed_holds: dict[str, HoldState] = field(default_factory=dict)
    closed: list[ClosedHold] = field(default_factory=list)
    moves: dict[str, _Move] = field(default_factory=dict)

    def move(
        self, organization_id: str, *, posted: int, held: int, is_guarded: bool = False
    ) -> None:
        """Add to a balance; guarded: only if it is not below zero in the end."""
        move = self.moves.setdefault(organization_id, _Move())
        move.posted += posted
        move.held += held
        move.is_guarded |= is_guarded


async def write_changes(
    connection: AsyncConnection,
    changes: BookChanges,
    open_lots: dict[str, list[OpenLot]],
    *,
    now_us: int,
) -> None:
    """Write a group's decisions in the connection's transaction."""
    calls = _calls(changes, open_lots, now_us)
    for call, answer in zip(calls, await send_together(connection, calls), strict=True):
        if answer.rowcount != len(call.rows):
            raise LedgerConflict(ROW_CHANGED)


async def commit_changes(
    connection: AsyncConnection,
    changes: BookChanges,
    open_lots: dict[str, list[OpenLot]],
    *,
    now_us: int,
    guards: Sequence[Call] = (),
) -> None:
    """Write a group's decisions and commit, in one round trip; or nothing, where a guard fails."""
    try:
        await commit_together(connection, [*guards, *_calls(changes, open_lots, now_us)])
    except RowMissed:
        raise LedgerConflict(ROW_CHANGED) from None


def _calls(changes: BookChanges, open_lots: dict[str, list[OpenLot]], now_us: int) -> list[Call]:
    return [
        *_of_holds(changes),
        *_of_ledger(changes.closed, open_lots, now_us),
        *_of_usage(changes.closed, now_us),
        _of_balances(changes.moves),
    ]


def _of_holds(changes: BookChanges) -> list[Call]:
    new_ids = {hold.request_id for hold in changes.new_holds}
    rows = [
        {f"b_{name}": value for name, value in hold.as_row().items()}
        | {"b_loaded_epoch": hold.loaded_epoch}
        for hold in changes.changed_holds.values()
        if hold.request_id not in new_ids
    ]
    return [
        Call(_ADD_HOLD, [hold.as_row() for hold in changes.new_holds]),
        Call(_CHANGE_HOLD, rows),
    ]


def _of_ledger(
    closed: Sequence[ClosedHold], open_lots: dict[str, list[OpenLot]], now_us: int
) -> list[Call]:
    """One transaction a charge, its entries, and what it took from the lots."""
    transactions, entries, lot_uses = [], [], []
    for ended in closed:
        if ended.charge_nano_usd == 0:
            continue
        transaction_id = new_id("txn")
        assert sum(amount for _, amount in ended.postings) == 0
        transactions.append(
            {
                "id": transaction_id,
                "key": f"usage:{ended.hold.request_id}",
                "kind": "usage",
                "organization_id": ended.hold.organization_id,
                "actor": ended.hold.gateway,
                "memo": ended.hold.model,
                "created_at": now_us,
            }
        )
        entries += [
            {
                "transaction_id": transaction_id,
                "line": line,
                "account": account,
                "amount_nano_usd": amount,
            }
            for line, (account, amount) in enumerate(ended.postings)
        ]
        lot_uses += [
            {
                "transaction_id": transaction_id,
                "lot_id": part.lot_id,
                "amount_nano_usd": part.amount_nano_usd,
            }
            for part in ended.uses
        ]
    used = {row["lot_id"] for row in lot_uses}
    remaining = [
        {"b_id": lot.id, "b_remaining": lot.remaining_nano_usd}
        for lots in open_lots.values()
        for lot in lots
        if lot.id in used
    ]
    return [
        Call(_ADD_TRANSACTION, transactions),
        Call(_ADD_ENTRY, entries),
        Call(_ADD_LOT_USE, lot_uses),
        Call(_CHANGE_LOT, remaining),
    ]


def _of_usage(closed: Sequence[ClosedHold], now_us: int) -> list[Call]:
    """A record for each closed hold, and the sums of its hour."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for ended in closed:
        hold = ended.hold
        counts = (
            1,
            ended.uncached_input_tokens,
            ended.cached_input_tokens,
            ended.output_tokens,
            ended.charge_nano_usd,
        )
        hour = sums[hold.organization_id, hold.api_key_id or NO_KEY, hold.model]
        for position, count in enumerate(counts):
            hour[position] += count
    rows = [
        dict(zip(HOUR_IDENTITY, key, strict=True))
        | dict(zip(HOUR_COUNTERS, sums[key], strict=True))
        | {"hour": now_us // US_PER_HOUR}
        for key in sorted(sums)
    ]
    return [
        Call(_ADD_USAGE, [_usage_row(ended, now_us) for ended in closed]),
        Call(_ADD_TO_HOUR, rows),
    ]


def _usage_row(ended: ClosedHold, now_us: int) -> dict[str, Any]:
    hold, facts = ended.hold, ended.facts
    return {
        "request_id": hold.request_id,
        "organization_id": hold.organization_id,
        "api_key_id": hold.api_key_id,
        "model": hold.model,
        "price_id": hold.price_id,
        "uncached_input_tokens": ended.uncached_input_tokens,
        "cached_input_tokens": ended.cached_input_tokens,
        "output_tokens": ended.output_tokens,
        "charge_nano_usd": ended.charge_nano_usd,
        "is_billable": ended.is_billable,
        "outcome": ended.outcome,
        "finish_reason": facts.finish_reason,
        "is_streamed": facts.streamed,
        "worker": facts.worker,
        "attempts": facts.attempts,
        "ttft_us": facts.ttft_us,
        "queued_us": facts.queued_us,
        "prefill_us": facts.prefill_us,
        "decode_us": facts.decode_us,
        "behind_own_us": facts.behind_own_us,
        "behind_others_us": facts.behind_others_us,
        "tenants_active": facts.tenants_active,
        "draft_tokens": facts.draft_tokens,
        "accepted_draft_tokens": facts.accepted_draft_tokens,
        "created_at": now_us,
    }


def _of_balances(moves: dict[str, _Move]) -> Call:
    """Last of all, and guarded: what new holds reserve must be covered by what is there."""
    rows = [
        {
            "b_organization_id": organization_id,
            "b_posted": moves[organization_id].posted,
            "b_held": moves[organization_id].held,
            "b_floor": 0 if moves[organization_id].is_guarded else _NO_FLOOR,
        }
        for organization_id in sorted(moves)
    ]
    return Call(_MOVE_BALANCE, rows)
