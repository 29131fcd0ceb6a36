"""Rows of exports, the same over the API and from the pages: exact amounts as decimal strings.

A period may hold any number of rows, so they come in pages that the caller writes on as it goes; no
transaction is open between two pages.
"""

import csv
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from billing import chart, statements
from billing.models import LedgerEntry, LedgerTransaction, Price, UsageRecord
from billing.money import format_usd
from billing.statements import Grouping, Line, Period
from common.clock import to_datetime
from common.db import Sessions, read_only

Format = Literal["json", "csv"]
Row = Mapping[str, str | int | None]

PAGE = 1_000
LINE_COLUMNS = (
    "requests",
    "uncached_input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "cost",
)
REQUEST_COLUMNS = (
    "id",
    "time",
    "model",
    "api_key",
    "outcome",
    "is_billable",
    "uncached_input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "input_price_per_million",
    "cached_input_price_per_million",
    "output_price_per_million",
    "cost",
)
MOVEMENT_COLUMNS = ("transaction", "time", "kind", "memo", "amount")


def line_row(group_by: Grouping, line: Line) -> Row:
    """Sums of one group."""
    counts = (
        line.requests,
        line.uncached_input_tokens,
        line.cached_input_tokens,
        line.output_tokens,
        format_usd(line.charge_nano_usd),
    )
    return {group_by: line.group} | dict(zip(LINE_COLUMNS, counts, strict=True))


def request_row(record: UsageRecord, price: Price) -> Row:
    """One request with the prices that it was charged at: enough to compute its cost again."""
    values = (
        record.request_id,
        _time(record.created_at),
        record.model,
        record.api_key_id,
        record.outcome,
        int(record.is_billable),
        record.uncached_input_tokens,
        record.cached_input_tokens,
        record.output_tokens,
        format_usd(price.input_nano_usd_per_million),
        format_usd(price.cached_input_nano_usd_per_million),
        format_usd(price.output_nano_usd_per_million),
        format_usd(record.charge_nano_usd),
    )
    return dict(zip(REQUEST_COLUMNS, values, strict=True))


def movement_row(transaction: LedgerTransaction, amount: int) -> Row:
    """One movement of the credit."""
    values = (
        transaction.id,
        _time(transaction.created_at),
        transaction.kind,
        transaction.memo,
        format_usd(amount),
    )
    return dict(zip(MOVEMENT_COLUMNS, values, strict=True))


async def lines(
    sessions: Sessions, organization_id: str, group_by: Grouping, period: Period
) -> AsyncIterator[list[Row]]:
    """The sums of a period, in one page."""
    async with read_only(sessions) as session:
        found = await statements.statement(
            session, organization_id, group_by=group_by, period=period
        )
    yield [line_row(group_by, line) for line in found]


async def requests(
    sessions: Sessions, organization_id: str, period: Period
) -> AsyncIterator[list[Row]]:
    """Every request of a period."""
    after = ""
    while True:
        async with read_only(sessions) as session:
            found = await statements.requests(
                session, organization_id, period=period, after=after, limit=PAGE
            )
        if not found:
            return
        after = found[-1][0].request_id
        yield [request_row(record, price) for record, price in found]


async def movements(
    sessions: Sessions, organization_id: str, period: Period
) -> AsyncIterator[list[Row]]:
    """Every movement of the credit in a period, oldest first."""
    after = (0, "")
    while True:
        async with read_only(sessions) as session:
            found = await _movements(session, organization_id, period, after)
        if not found:
            return
        after = (found[-1][0].created_at, found[-1][0].id)
        yield [movement_row(transaction, amount) for transaction, amount in found]


async def written(
    pages: AsyncIterator[list[Row]], columns: Sequence[str], wanted: Format
) -> AsyncIterator[str]:
    """The file, piece by piece: CSV with its header, or one JSON list."""
    if wanted == "csv":
        yield as_csv([columns])
        async for rows in pages:
            yield as_csv([list(row.values()) for row in rows])
        return
    separator = "["
    async for rows in pages:
        for row in rows:
            yield separator + json.dumps(row)
            separator = ",\n"
    yield "]\n" if separator != "[" else "[]\n"


def as_csv(rows: Sequence[Sequence[str | int | None]]) -> str:
    """Lines of a CSV file."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


async def _movements(
    session: AsyncSession, organization_id: str, period: Period, after: tuple[int, str]
) -> list[tuple[LedgerTransaction, int]]:
    place = tuple_(LedgerTransaction.created_at, LedgerTransaction.id)
    found = await session.execute(
        select(LedgerTransaction, LedgerEntry.amount_nano_usd)
        .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .where(
            LedgerTransaction.organization_id == organization_id,
            LedgerEntry.account == chart.customer(organization_id),
            LedgerTransaction.created_at >= period.start_us,
            LedgerTransaction.created_at < period.end_us,
            place > after,
        )
        .order_by(LedgerTransaction.created_at, LedgerTransaction.id)
        .limit(PAGE)
    )
    return [(transaction, amount) for transaction, amount in found]


def _time(time_us: int) -> str:
    return to_datetime(time_us).isoformat(timespec="microseconds")
