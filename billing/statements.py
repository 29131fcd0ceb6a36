"""Statements: usage by hour, day, model, key or project, in any time zone; and what makes them up.

Whole-hour zones are answered from `usage_hours`, the others (India, Nepal) from the records by
quarter hours; both are the same numbers, and both are what the ledger charged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import BigInteger, ColumnElement, cast, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from accounts.models import ApiKey
from billing.book_writer import NO_KEY, US_PER_HOUR
from billing.errors import InvalidPeriod
from billing.models import Price, UsageHour, UsageRecord
from common.clock import MICROSECONDS_PER_SECOND, Clock, to_datetime, utc_now_us

Grouping = Literal["hour", "day", "model", "key", "project"]
US_PER_QUARTER = 900_000_000
MAX_DAYS = 366
NO_PROJECT = "none"


@dataclass(frozen=True, slots=True)
class Period:
    """Days of a time zone: from the first midnight to the one after the last day."""

    zone: ZoneInfo
    first: date
    last: date

    @property
    def start_us(self) -> int:
        """The first instant."""
        return _midnight_us(self.first, self.zone)

    @property
    def end_us(self) -> int:
        """The first instant that is no longer in it."""
        return _midnight_us(self.last + timedelta(days=1), self.zone)

    @property
    def is_whole_hours(self) -> bool:
        """Each of its midnights is a whole hour of UTC, so that hourly sums can be added up."""
        days = (self.last - self.first).days + 2
        midnights = (self.first + timedelta(days=day) for day in range(days))
        return all(_midnight_us(day, self.zone) % US_PER_HOUR == 0 for day in midnights)


@dataclass(slots=True)
class Line:
    """Sums of one group. Token counts are disjoint."""

    group: str
    requests: int = 0
    uncached_input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    charge_nano_usd: int = 0

    def add(self, counts: tuple[int, int, int, int, int]) -> None:
        """Count one slot's sums in."""
        self.requests += counts[0]
        self.uncached_input_tokens += counts[1]
        self.cached_input_tokens += counts[2]
        self.output_tokens += counts[3]
        self.charge_nano_usd += counts[4]


@dataclass(frozen=True, slots=True)
class _Slot:
    start_us: int
    model: str
    api_key_id: str
    counts: tuple[int, int, int, int, int]


def period_of(
    timezone: str, first: date | None, last: date | None, *, clock: Clock = utc_now_us
) -> Period:
    """Days of a zone, the last 30 unless they are named; raises InvalidPeriod."""
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidPeriod("There is no such time zone.", param="timezone") from error
    last = last or to_datetime(clock()).astimezone(zone).date()
    first = first or last - timedelta(days=29)
    if not date(2000, 1, 1) <= first <= last <= date(2200, 1, 1):
        raise InvalidPeriod("The first day comes after the last.", param="from")
    if (last - first).days >= MAX_DAYS:
        raise InvalidPeriod(f"At most {MAX_DAYS} days at once.", param="from")
    return Period(zone, first, last)


async def statement(
    session: AsyncSession, organization_id: str, *, group_by: Grouping, period: Period
) -> list[Line]:
    """Sums of the period by group, in the groups' order. Together they are what was charged."""
    slots = await _slots(session, organization_id, period)
    name = _namer(group_by, period.zone, await _projects(session, organization_id))
    lines: dict[str, Line] = {}
    for slot in sorted(slots, key=lambda slot: slot.start_us):
        group = name(slot)
        lines.setdefault(group, Line(group)).add(slot.counts)
    is_by_time = group_by in ("hour", "day")
    return list(lines.values()) if is_by_time else [lines[group] for group in sorted(lines)]


async def requests(
    session: AsyncSession, organization_id: str, *, period: Period, after: str, limit: int
) -> list[tuple[UsageRecord, Price]]:
    """Requests of the period with the prices that they were charged at, by id after `after`."""
    found = await session.execute(
        select(UsageRecord, Price)
        .join(Price, Price.id == UsageRecord.price_id)
        .where(
            UsageRecord.organization_id == organization_id,
            UsageRecord.created_at >= period.start_us,
            UsageRecord.created_at < period.end_us,
            UsageRecord.request_id > after,
        )
        .order_by(UsageRecord.request_id)
        .limit(limit)
    )
    return [(record, price) for record, price in found]


async def _slots(session: AsyncSession, organization_id: str, period: Period) -> list[_Slot]:
    source: type[UsageHour | UsageRecord]
    if period.is_whole_hours:
        source, slot_us, requests_ = UsageHour, US_PER_HOUR, _total(UsageHour.requests)
        slot: ColumnElement[int] = UsageHour.hour.expression
        key: ColumnElement[str] = UsageHour.api_key_id.expression
    else:
        source, slot_us, requests_ = UsageRecord, US_PER_QUARTER, func.count(literal(1))
        slot = UsageRecord.created_at // US_PER_QUARTER
        key = func.coalesce(UsageRecord.api_key_id, NO_KEY)
    slot = slot.label("slot")
    key = key.label("key")
    found = await session.execute(
        select(
            slot,
            source.model,
            key,
            requests_,
            _total(source.uncached_input_tokens),
            _total(source.cached_input_tokens),
            _total(source.output_tokens),
            _total(source.charge_nano_usd),
        )
        .where(
            source.organization_id == organization_id,
            slot >= period.start_us // slot_us,
            slot < period.end_us // slot_us,
        )
        .group_by(slot, source.model, key)
    )
    return [
        _Slot(row[0] * slot_us, row[1], row[2], (row[3], row[4], row[5], row[6], row[7]))
        for row in found
    ]


async def _projects(session: AsyncSession, organization_id: str) -> dict[str, str | None]:
    found = await session.execute(
        select(ApiKey.id, ApiKey.project_id).where(ApiKey.organization_id == organization_id)
    )
    return {row[0]: row[1] for row in found}


def _namer(
    group_by: Grouping, zone: ZoneInfo, projects: dict[str, str | None]
) -> Callable[[_Slot], str]:
    """What each grouping calls a slot."""
    match group_by:
        case "hour":
            return lambda slot: _hour(slot.start_us, zone)
        case "day":
            return lambda slot: to_datetime(slot.start_us).astimezone(zone).date().isoformat()
        case "model":
            return lambda slot: slot.model
        case "key":
            return lambda slot: slot.api_key_id
        case "project":
            return lambda slot: projects.get(slot.api_key_id) or NO_PROJECT


def _hour(time_us: int, zone: ZoneInfo) -> str:
    """The local hour with its offset, so that the hour that a clock repeats has two names."""
    local = to_datetime(time_us).astimezone(zone)
    return local.replace(minute=0, second=0, microsecond=0).isoformat(timespec="minutes")


def _midnight_us(day: date, zone: ZoneInfo) -> int:
    local = datetime(day.year, day.month, day.day, tzinfo=zone)
    return int(local.timestamp()) * MICROSECONDS_PER_SECOND


def _total(column: InstrumentedAttribute[int]) -> ColumnElement[int]:
    return cast(func.sum(column), BigInteger)
