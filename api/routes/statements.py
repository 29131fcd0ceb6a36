"""Statements as JSON or CSV: sums by group, every request with its prices, every ledger entry."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse, Response

from api.authentication import AnyCaller
from api.dependencies import ServicesDependency
from api.openapi import errors
from billing import ledger, statements
from billing.models import Price, UsageRecord
from billing.money import format_usd
from billing.statements import Grouping, Line, Period
from common.clock import to_datetime
from common.db import read_only

router = APIRouter(tags=["account"])

Format = Literal["json", "csv"]
AS_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}
Row = Mapping[str, str | int | None]


def period(
    services: ServicesDependency,
    timezone: Annotated[str, Query(max_length=64, examples=["Europe/Berlin"])] = "UTC",
    first: Annotated[date | None, Query(alias="from")] = None,
    last: Annotated[date | None, Query(alias="to")] = None,
) -> Period:
    """Days of a time zone, `to` included; the last 30 unless they are named."""
    return statements.period_of(timezone, first, last, clock=services.clock)


PeriodDependency = Annotated[Period, Depends(period)]


@router.get("/v1/usage/statement", responses=AS_CSV | errors(400, 401))
async def get_statement(
    services: ServicesDependency,
    principal: AnyCaller,
    chosen: PeriodDependency,
    group_by: Grouping = "day",
    format: Format = "json",  # noqa: A002 - the parameter's own name
) -> Response:
    """Requests, tokens and cost by hour, day, model, key or project; the total is their sum."""
    async with read_only(services.sessions) as session:
        lines = await statements.statement(
            session, principal.organization_id, group_by=group_by, period=chosen
        )
    total = sum(line.charge_nano_usd for line in lines)
    return _answer([_line(group_by, line) for line in lines], format, total=format_usd(total))


@router.get("/v1/usage/requests", responses=AS_CSV | errors(400, 401))
async def get_requests(
    services: ServicesDependency,
    principal: AnyCaller,
    chosen: PeriodDependency,
    after: Annotated[str, Query(max_length=64)] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
    format: Format = "json",  # noqa: A002 - the parameter's own name
) -> Response:
    """Every request with its prices, so that the bill can be computed again. `after` pages on."""
    async with read_only(services.sessions) as session:
        found = await statements.requests(
            session, principal.organization_id, period=chosen, after=after, limit=limit
        )
    return _answer([_request(record, price) for record, price in found], format)


@router.get("/v1/credits/ledger", responses=AS_CSV | errors(400, 401))
async def get_ledger(
    services: ServicesDependency,
    principal: AnyCaller,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
    format: Format = "json",  # noqa: A002 - the parameter's own name
) -> Response:
    """The latest movements of the credit, newest first; all of them together are the balance."""
    async with read_only(services.sessions) as session:
        found = await ledger.entries(session, principal.organization_id, limit)
    rows = [
        {
            "transaction": transaction.id,
            "time": _time(transaction.created_at),
            "kind": transaction.kind,
            "memo": transaction.memo,
            "amount": format_usd(amount),
        }
        for transaction, amount in found
    ]
    return _answer(rows, format)


def _line(group_by: str, line: Line) -> Row:
    return {
        group_by: line.group,
        "requests": line.requests,
        "uncached_input_tokens": line.uncached_input_tokens,
        "cached_input_tokens": line.cached_input_tokens,
        "output_tokens": line.output_tokens,
        "cost": format_usd(line.charge_nano_usd),
    }


def _request(record: UsageRecord, price: Price) -> Row:
    return {
        "id": record.request_id,
        "time": _time(record.created_at),
        "model": record.model,
        "api_key": record.api_key_id,
        "outcome": record.outcome,
        "is_billable": int(record.is_billable),
        "uncached_input_tokens": record.uncached_input_tokens,
        "cached_input_tokens": record.cached_input_tokens,
        "output_tokens": record.output_tokens,
        "input_price_per_million": format_usd(price.input_nano_usd_per_million),
        "cached_input_price_per_million": format_usd(price.cached_input_nano_usd_per_million),
        "output_price_per_million": format_usd(price.output_nano_usd_per_million),
        "cost": format_usd(record.charge_nano_usd),
    }


def _time(time_us: int) -> str:
    return to_datetime(time_us).isoformat(timespec="microseconds")


def _answer(rows: Sequence[Row], wanted: Format, **more: str) -> Response:
    if wanted == "json":
        return JSONResponse({"object": "list", "data": rows} | more)
    written = io.StringIO()
    if rows:
        writer = csv.DictWriter(written, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    headers = {"content-disposition": "attachment; filename=statement.csv"}
    return Response(written.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)
