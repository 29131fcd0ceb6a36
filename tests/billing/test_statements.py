"""Statements in every time zone add up to what the ledger charged."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import func, select

from billing import statements
from billing.errors import InvalidPeriod
from billing.holds import HoldWriter
from billing.models import UsageRecord
from billing.statements import Grouping, Line
from common.db import read_only
from tests.billing.conftest import Books, settle_of

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kathmandu",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "America/Havana",
    "Pacific/Apia",
]
GROUPINGS: tuple[Grouping, ...] = ("hour", "model", "key", "project")
SUNDAY = date(2026, 10, 25)
"""Clocks go back in Berlin: its day has 25 hours."""


async def some_use(books: Books) -> None:
    """A request every 37 minutes, from three days before that Sunday to three days after it."""
    start = datetime(2026, 10, 22, tzinfo=UTC)
    now = [0]
    writer = HoldWriter(books.sessions, clock=lambda: now[0])
    await writer.start()
    for number in range(233):
        now[0] = int((start + timedelta(minutes=37 * number)).timestamp()) * 1_000_000
        hold = await writer.admit(books.admit(api_key_id=None if number % 3 else books_key(books)))
        await writer.settle(settle_of(hold, 100 - number % 7, number % 7, number % 11))
    await writer.stop()


def books_key(books: Books) -> str:
    return books.customer.issued_key.key.id


async def lines_of(
    books: Books, group_by: Grouping, zone: str, first: date, last: date
) -> list[Line]:
    async with read_only(books.sessions) as session:
        return await statements.statement(
            session,
            books.organization_id,
            group_by=group_by,
            period=statements.period_of(zone, first, last),
        )


async def expected_by_day(books: Books, zone: str) -> dict[str, int]:
    """From the records alone, one by one."""
    sums: dict[str, int] = {}
    async with read_only(books.sessions) as session:
        for record in await session.scalars(select(UsageRecord)):
            time = datetime.fromtimestamp(record.created_at // 1_000_000, tz=UTC)
            day = time.astimezone(ZoneInfo(zone)).date().isoformat()
            sums[day] = sums.get(day, 0) + record.charge_nano_usd
    return sums


@pytest.mark.slow
async def test_days_of_every_zone_add_up(books: Books) -> None:
    """litellm 27780, 29568, 41363: UTC buckets shown as local days."""
    await some_use(books)
    first, last = date(2026, 10, 20), date(2026, 10, 30)
    for zone in ZONES:
        days = await lines_of(books, "day", zone, first, last)
        expected = await expected_by_day(books, zone)
        assert {day.group: day.charge_nano_usd for day in days} == expected, zone
        for group_by in GROUPINGS:
            lines = await lines_of(books, group_by, zone, first, last)
            assert sum(line.charge_nano_usd for line in lines) == sum(expected.values())
            assert sum(line.requests for line in lines) == 233
        one_by_one = 0
        for day in range((last - first).days + 1):
            when = first + timedelta(days=day)
            one_by_one += sum(
                line.charge_nano_usd for line in await lines_of(books, "model", zone, when, when)
            )
        assert one_by_one == sum(expected.values()), zone
    async with read_only(books.sessions) as session:
        charged = await session.scalar(select(func.sum(UsageRecord.charge_nano_usd)))
    assert charged == sum((await expected_by_day(books, "UTC")).values())


@pytest.mark.slow
async def test_the_hour_that_a_clock_repeats_has_two_names(books: Books) -> None:
    await some_use(books)
    hours = await lines_of(books, "hour", "Europe/Berlin", SUNDAY, SUNDAY)
    names = [hour.group for hour in hours]
    assert "2026-10-25T02:00+02:00" in names
    assert "2026-10-25T02:00+01:00" in names
    assert len(names) == len(set(names)) == 25


@pytest.mark.parametrize("zone", ["Nowhere/City", "", "../../etc/passwd", "/etc/localtime", "\0"])
def test_only_time_zones_are_time_zones(zone: str) -> None:
    with pytest.raises(InvalidPeriod) as refused:
        statements.period_of(zone, None, None)
    assert refused.value.facts["param"] == "timezone"


def test_a_period_is_at_most_a_year_and_not_backwards() -> None:
    for first, last in (
        (date(2026, 2, 1), date(2026, 1, 1)),
        (date(2025, 1, 1), date(2026, 2, 1)),
        (date(1, 1, 1), date(1, 1, 2)),
        (date(9999, 12, 31), date(9999, 12, 31)),
    ):
        with pytest.raises(InvalidPeriod):
            statements.period_of("UTC", first, last)
