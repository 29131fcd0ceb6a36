"""Budgets: how much a key, or all keys of a project, may spend in a day, a month or at all.

A budget has no counters of its own that could drift. What is spent is in `usage_hours`, what is held
is in the open holds, and both are read under the lock on the organization's balance that every
admission, extension and settlement takes; so a budget is as exact under concurrency as the balance.
Days and months are UTC. A hold counts where it is settled.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from typing import Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from accounts.errors import KeyNotFound
from accounts.models import ApiKey
from accounts.projects import find_project
from billing.errors import InvalidAmount
from billing.models import OPEN, Budget, HoldRecord, UsageHour
from billing.money import MAX_NANO_USD
from common.clock import Clock, to_datetime, utc_now_us
from common.ids import new_id
from common.round_trip import Call, Statement, send_together
from common.upsert import insert_for

Period = Literal["day", "month", "total"]
SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True, slots=True)
class Bound:
    """A budget as it is set; of a key, or of all keys of a project."""

    organization_id: str
    api_key_id: str | None
    project_id: str | None
    period: str
    limit_nano_usd: int


@dataclass(slots=True)
class OpenBudget:
    """A budget as one transaction sees and uses it."""

    limit_nano_usd: int
    spent_nano_usd: int
    held_nano_usd: int

    @property
    def left(self) -> int:
        """What may still be held; negative when the limit was lowered since."""
        return self.limit_nano_usd - self.spent_nano_usd - self.held_nano_usd


async def set_budget(
    session: AsyncSession,
    organization_id: str,
    *,
    api_key_id: str | None = None,
    project_id: str | None = None,
    limit_nano_usd: int,
    period: Period,
    clock: Clock = utc_now_us,
) -> Budget:
    """Bound a key or a project; again, it replaces. Raises KeyNotFound, ProjectNotFound."""
    assert (api_key_id is None) != (project_id is None), "a budget bounds one thing"
    if not 0 <= limit_nano_usd <= MAX_NANO_USD:
        raise InvalidAmount("A budget cannot be negative.")
    if project_id is not None:
        await find_project(session, organization_id, project_id)
    elif not await _has_key(session, organization_id, api_key_id):
        raise KeyNotFound("This organization has no such key.", api_key_id=api_key_id)
    scope = "api_key_id" if project_id is None else "project_id"
    statement = insert_for(session, Budget).values(
        id=new_id("bud"),
        organization_id=organization_id,
        api_key_id=api_key_id,
        project_id=project_id,
        period=period,
        limit_nano_usd=limit_nano_usd,
        created_at=clock(),
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[scope], set_={"period": period, "limit_nano_usd": limit_nano_usd}
        )
    )
    found = await session.scalars(
        select(Budget)
        .where(
            Budget.organization_id == organization_id,
            Budget.api_key_id == api_key_id
            if project_id is None
            else Budget.project_id == project_id,
        )
        .execution_options(populate_existing=True)
    )
    return found.one()


async def remove_budget(session: AsyncSession, organization_id: str, budget_id: str) -> None:
    """Bound it no longer; does nothing when there is none."""
    await session.execute(
        delete(Budget).where(Budget.organization_id == organization_id, Budget.id == budget_id)
    )


async def list_budgets(
    session: AsyncSession, organization_id: str, *, clock: Clock = utc_now_us
) -> list[tuple[Budget, OpenBudget]]:
    """Every budget of an organization and how it stands, oldest first."""
    found = await session.scalars(
        select(Budget)
        .where(Budget.organization_id == organization_id)
        .order_by(Budget.created_at, Budget.id)
    )
    budgets = found.all()
    bounds = [_bound(budget) for budget in budgets]
    stands = await load_stands(await session.connection(), bounds, now_us=clock())
    return list(zip(budgets, stands, strict=True))


async def load_stands(
    connection: AsyncConnection, bounds: Iterable[Bound], *, now_us: int
) -> list[OpenBudget]:
    """How each of these budgets stands. Exact while the balances are locked."""
    bounds = list(bounds)
    answers = await send_together(connection, [_asking(bound, now_us) for bound in bounds])
    return [
        OpenBudget(bound.limit_nano_usd, *answer.rows[0])
        for bound, answer in zip(bounds, answers, strict=True)
    ]


def _bound(budget: Budget) -> Bound:
    return Bound(
        budget.organization_id,
        budget.api_key_id,
        budget.project_id,
        budget.period,
        budget.limit_nano_usd,
    )


def _asking(bound: Bound, now_us: int) -> Call:
    values = {
        "organization_id": bound.organization_id,
        "scope": bound.api_key_id or bound.project_id,
        "first_hour": _first_hour(bound.period, now_us),
    }
    return Call(_STAND_OF_KEY if bound.project_id is None else _STAND_OF_PROJECT, [values])


def _first_hour(period: str, now_us: int) -> int:
    """The first hour that counts, in whole hours since the epoch."""
    if period == "total":
        return 0
    start = to_datetime(now_us).astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "month":
        start = start.replace(day=1)
    return int(start.timestamp()) // SECONDS_PER_HOUR


def _total(column: InstrumentedAttribute[int]) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(column), literal_column("0")), BigInteger)


def _standing(of_hour: ColumnElement[bool], of_hold: ColumnElement[bool]) -> Statement:
    """What was spent in the hours from `:first_hour` on, and what open holds hold."""
    spent = select(_total(UsageHour.charge_nano_usd)).where(
        UsageHour.organization_id == bindparam("organization_id"),
        UsageHour.hour >= bindparam("first_hour"),
        of_hour,
    )
    held = select(_total(HoldRecord.amount_nano_usd)).where(
        HoldRecord.organization_id == bindparam("organization_id"),
        HoldRecord.state == OPEN,
        of_hold,
    )
    return Statement.of(select(spent.scalar_subquery(), held.scalar_subquery()))


_KEYS_OF_PROJECT = select(ApiKey.id).where(ApiKey.project_id == bindparam("scope"))
_STAND_OF_KEY = _standing(
    UsageHour.api_key_id == bindparam("scope"), HoldRecord.api_key_id == bindparam("scope")
)
_STAND_OF_PROJECT = _standing(
    UsageHour.api_key_id.in_(_KEYS_OF_PROJECT), HoldRecord.api_key_id.in_(_KEYS_OF_PROJECT)
)


async def _has_key(session: AsyncSession, organization_id: str, api_key_id: str | None) -> bool:
    found = await session.scalars(
        select(ApiKey.id).where(ApiKey.organization_id == organization_id, ApiKey.id == api_key_id)
    )
    return found.one_or_none() is not None
