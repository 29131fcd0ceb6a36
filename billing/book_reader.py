"""What a group of operations on holds must know, read under locks in as few round trips as can be.

The order of the locks is the same for everybody: holds, then balances, each by its id. Where every
operation says whose hold it is, all is known beforehand that must be asked for, so it is one round
trip; else the holds say whose balance it is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from accounts.models import ApiKey, Organization
from billing import budgets, lots
from billing.book_writer import HOLD_COLUMNS, HoldState
from billing.budgets import Bound, OpenBudget
from billing.hold_operations import AdmitHold, ExtendHold, HoldOperation, SettleHold
from billing.models import Balance, Budget, HoldRecord
from common.clock import Clock
from common.round_trip import Call, Row, Statement, send_together

_OF_KEY, _OF_PROJECT = aliased(Budget), aliased(Budget)
_HOLD = Statement.of(
    select(HoldRecord.__table__)
    .where(HoldRecord.request_id == bindparam("request_id"))
    .with_for_update()
)
_KEY = Statement.of(
    select(
        ApiKey.id,
        ApiKey.organization_id,
        ApiKey.revoked_at,
        ApiKey.expires_at,
        _OF_KEY.period,
        _OF_KEY.limit_nano_usd,
        ApiKey.project_id,
        _OF_PROJECT.period,
        _OF_PROJECT.limit_nano_usd,
    )
    .join_from(ApiKey, _OF_KEY, _OF_KEY.api_key_id == ApiKey.id, isouter=True)
    .join(_OF_PROJECT, _OF_PROJECT.project_id == ApiKey.project_id, isouter=True)
    .where(ApiKey.id == bindparam("key_id"))
)
_ACCOUNT = Statement.of(
    select(
        Balance.organization_id,
        Organization.status,
        Balance.posted_nano_usd,
        Balance.held_nano_usd,
    )
    .join_from(Balance, Organization, Organization.id == Balance.organization_id)
    .where(Balance.organization_id == bindparam("organization_id"))
    .with_for_update(of=Balance)
)


@dataclass(slots=True)
class Account:
    """A balance while this transaction holds its lock."""

    status: str
    posted: int
    held: int

    @property
    def available(self) -> int:
        """What may still be held."""
        return self.posted - self.held


@dataclass(frozen=True, slots=True)
class Key:
    """An API key, and what it and its project may spend."""

    organization_id: str
    revoked_at: int | None
    expires_at: int | None
    bounds: tuple[Bound, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The rows that a group is about."""

    now_us: int
    """Of a moment at which the locks were held."""
    holds: dict[str, HoldState]
    accounts: dict[str, Account]
    keys: dict[str, Key]
    lots: dict[str, list[lots.OpenLot]]
    budgets: dict[str, list[OpenBudget]]
    """What bounds each key, if anything; a project's is shared between its keys."""


async def read(
    connection: AsyncConnection, operations: Sequence[HoldOperation], *, clock: Clock
) -> Reading:
    """Load and lock everything that `operations` may touch."""
    owned = [(operation, operation.owner) for operation in operations]
    known = [(operation, owner) for operation, owner in owned if owner is not None]
    organization_ids = {owner.organization_id for _, owner in known}
    key_ids = {o.api_key_id for one, o in known if isinstance(one, AdmitHold | ExtendHold)}
    request_ids = sorted({operation.request_id for operation in operations})
    asking = Call(_HOLD, [{"request_id": request_id} for request_id in request_ids])
    if len(known) == len(operations):
        charged = {owner.organization_id for one, owner in known if isinstance(one, SettleHold)}
        found, *others = await send_together(
            connection, [asking, *_asking(key_ids, organization_ids, charged)]
        )
        holds = _holds(found.rows)
        assert all(hold.organization_id in organization_ids for hold in holds.values())
    else:
        (found,) = await send_together(connection, [asking])
        holds = _holds(found.rows)
        organization_ids |= {hold.organization_id for hold in holds.values()}
        key_ids |= {hold.api_key_id for hold in _of(ExtendHold, operations, holds)}
        charged = {hold.organization_id for hold in _of(SettleHold, operations, holds)}
        others = await send_together(connection, _asking(key_ids, organization_ids, charged))
    found_keys, accounts, open_lots = others
    now_us = clock()
    keys = {row[0]: _key(*row) for row in found_keys.rows}
    return Reading(
        now_us=now_us,
        holds=holds,
        accounts={row[0]: Account(*row[1:]) for row in accounts.rows},
        keys=keys,
        lots=lots.in_order(open_lots.rows),
        budgets=await _read_budgets(connection, keys, now_us),
    )


def _asking(
    key_ids: Collection[str | None], organization_ids: Collection[str], charged: Collection[str]
) -> list[Call]:
    """Keys first: the locks on the balances are held as briefly as can be."""
    return [
        Call(_KEY, [{"key_id": key_id} for key_id in key_ids if key_id is not None]),
        Call(_ACCOUNT, [{"organization_id": one} for one in sorted(organization_ids)]),
        lots.asking_for_lots(charged),
    ]


def _of(
    kind: type[HoldOperation], operations: Sequence[HoldOperation], holds: dict[str, HoldState]
) -> list[HoldState]:
    """The holds that operations of this kind are about, as far as there are any."""
    return [
        holds[operation.request_id]
        for operation in operations
        if isinstance(operation, kind) and operation.request_id in holds
    ]


def _holds(rows: Sequence[Row]) -> dict[str, HoldState]:
    holds = {}
    for row in rows:
        hold = HoldState(**dict(zip(HOLD_COLUMNS, row, strict=True)))
        hold.loaded_epoch = hold.epoch
        holds[hold.request_id] = hold
    return holds


def _key(
    key_id: str,
    organization_id: str,
    revoked_at: int | None,
    expires_at: int | None,
    key_period: str | None,
    key_limit: int,
    project_id: str | None,
    project_period: str | None,
    project_limit: int,
) -> Key:
    bounds = []
    if key_period is not None:
        bounds.append(Bound(organization_id, key_id, None, key_period, key_limit))
    if project_period is not None:
        bounds.append(Bound(organization_id, None, project_id, project_period, project_limit))
    return Key(organization_id, revoked_at, expires_at, tuple(bounds))


async def _read_budgets(
    connection: AsyncConnection, keys: dict[str, Key], now_us: int
) -> dict[str, list[OpenBudget]]:
    """How the budgets of these keys stand. After the balances: their locks make it exact."""
    bounds = list(dict.fromkeys(bound for key in keys.values() for bound in key.bounds))
    stands = dict(
        zip(bounds, await budgets.load_stands(connection, bounds, now_us=now_us), strict=True)
    )
    return {key_id: [stands[bound] for bound in key.bounds] for key_id, key in keys.items()}
