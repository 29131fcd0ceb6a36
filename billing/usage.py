"""Usage: what an organization's requests used and cost. Written by holds, read here."""

from dataclasses import dataclass
from datetime import UTC, date, datetime

from sqlalchemy import BigInteger, ColumnElement, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from billing.models import UsageHour, UsageRecord
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us

__all__ = ["DailyUsage", "UsageRecord", "by_day", "find", "recent"]

HOURS_PER_DAY = 24
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class DailyUsage:
    """Sums of one UTC day and model. `input_tokens` is the whole prompt, cached part included."""

    day: date
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    charge_nano_usd: int


async def recent(session: AsyncSession, organization_id: str, limit: int) -> list[UsageRecord]:
    """The organization's latest requests, newest first."""
    found = await session.scalars(
        select(UsageRecord)
        .where(UsageRecord.organization_id == organization_id)
        .order_by(UsageRecord.created_at.desc(), UsageRecord.request_id.desc())
        .limit(limit)
    )
    return list(found)


async def find(session: AsyncSession, organization_id: str, request_id: str) -> UsageRecord | None:
    """One closed request of this organization."""
    found = await session.scalars(
        select(UsageRecord).where(
            UsageRecord.organization_id == organization_id, UsageRecord.request_id == request_id
        )
    )
    return found.one_or_none()


async def by_day(
    session: AsyncSession, organization_id: str, days: int, *, clock: Clock = utc_now_us
) -> list[DailyUsage]:
    """Sums of the last `days` UTC days, today included, by day and model, oldest first."""
    today = clock() // (SECONDS_PER_DAY * MICROSECONDS_PER_SECOND)
    day = (UsageHour.hour - UsageHour.hour % HOURS_PER_DAY).label("day")
    found = await session.execute(
        select(
            day,
            UsageHour.model,
            _total(UsageHour.requests),
            _total(UsageHour.uncached_input_tokens + UsageHour.cached_input_tokens),
            _total(UsageHour.cached_input_tokens),
            _total(UsageHour.output_tokens),
            _total(UsageHour.charge_nano_usd),
        )
        .where(
            UsageHour.organization_id == organization_id,
            UsageHour.hour >= (today - days + 1) * HOURS_PER_DAY,
        )
        .group_by(day, UsageHour.model)
        .order_by(day, UsageHour.model)
    )
    return [
        DailyUsage(datetime.fromtimestamp(first_hour * 3_600, tz=UTC).date(), model, *sums)
        for first_hour, model, *sums in found
    ]


def _total(column: ColumnElement[int] | InstrumentedAttribute[int]) -> ColumnElement[int]:
    """A sum that stays an integer: PostgreSQL's sum of BIGINT is NUMERIC."""
    return cast(func.sum(column), BigInteger)
