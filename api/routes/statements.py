"""Statements as JSON or CSV: sums by group, every request with its prices, every ledger entry."""

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse, Response

from api.authentication import AnyCaller
from api.dependencies import ServicesDependency
from api.openapi import errors
from billing import ledger, statements
from billing.exports import (
    LINE_COLUMNS,
    MOVEMENT_COLUMNS,
    REQUEST_COLUMNS,
    Format,
    Row,
    as_csv,
    line_row,
    movement_row,
    request_row,
)
from billing.money import format_usd
from billing.statements import Grouping, Period
from common.db import read_only

router = APIRouter(tags=["account"])

AS_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}


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
    rows = [line_row(group_by, line) for line in lines]
    return _answer(rows, (group_by, *LINE_COLUMNS), format, total=format_usd(total))


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
    rows = [request_row(record, price) for record, price in found]
    return _answer(rows, REQUEST_COLUMNS, format)


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
    rows = [movement_row(transaction, amount) for transaction, amount in found]
    return _answer(rows, MOVEMENT_COLUMNS, format)


def _answer(rows: Sequence[Row], columns: Sequence[str], wanted: Format, **more: str) -> Response:
    if wanted == "json":
        return JSONResponse({"object": "list", "data": rows} | more)
    text = as_csv([columns, *(list(row.values()) for row in rows)])
    headers = {"content-disposition": "attachment; filename=statement.csv"}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)
