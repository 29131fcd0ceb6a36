"""Export forms of the pages: days, their time zone, what to sum by; the answer is a file."""

from collections.abc import AsyncIterator, Sequence
from datetime import date
from typing import Any, get_args

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from billing import exports, statements
from billing.errors import InvalidPeriod
from billing.exports import Format, Row
from billing.statements import Grouping, Period
from common.clock import Clock
from web.forms import FormState

MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
MAX_LENGTH = 64


def asked(request: Request, clock: Clock) -> FormState:
    """What was typed, or the last 30 days in UTC."""
    query = {name: value[:MAX_LENGTH] for name, value in request.query_params.items()}
    period = statements.period_of("UTC", None, None, clock=clock)
    defaults = {"from": period.first.isoformat(), "to": period.last.isoformat(), "timezone": "UTC"}
    return FormState(values=defaults | query)


def period_of(form: FormState, clock: Clock) -> Period:
    """The days that the form names; raises InvalidPeriod with the field as `param`."""
    days: list[date] = []
    for name in ("from", "to"):
        try:
            days.append(date.fromisoformat(form.value(name)))
        except ValueError:
            raise InvalidPeriod("Write a day as 2026-03-31.", param=name) from None
    return statements.period_of(form.value("timezone"), days[0], days[1], clock=clock)


def wrong(form: FormState, error: InvalidPeriod) -> FormState:
    """The form again, and what is wrong with it. A browser shows no day that is none."""
    field = str(error.facts["param"])
    values = {name: value for name, value in form.values.items() if name != field}
    return FormState(values=values, errors={field: error.message})


def answer(
    name: str,
    form: FormState,
    period: Period,
    columns: Sequence[str],
    pages: AsyncIterator[list[Row]],
) -> Response:
    """The file, written on while it is read."""
    wanted: Format = "json" if form.value("format") == "json" else "csv"
    file = f"ncompass-{name}-{period.first}-{period.last}.{wanted}"
    body: Any = exports.written(pages, columns, wanted)
    headers = {"content-disposition": f'attachment; filename="{file}"'}
    return StreamingResponse(body, media_type=MEDIA_TYPES[wanted], headers=headers)
