"""What was used and what it cost."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from billing import ledger, usage
from billing.errors import InvalidPeriod
from billing.exports import LINE_COLUMNS, REQUEST_COLUMNS, lines, requests
from billing.models import UsageRecord
from common.clock import to_datetime
from common.db import read_only
from web import exports
from web.charts import MEASURES, usage_chart
from web.dependencies import Account, Services, SignedIn
from web.forms import FormState
from web.pages import get_pages
from web.routes.examples import example_request
from web.services import WebServices

router = APIRouter()


@dataclass(frozen=True, slots=True)
class ListedRequest:
    """One finished request as the page shows it."""

    request_id: str
    created_at: int
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_us: int | None
    finish: str
    charge_nano_usd: int


@router.api_route("/usage", methods=["GET", "HEAD"])
async def show_usage(request: Request, services: Services, account: SignedIn) -> Response:
    """Balance, a chart of the last days, and the last requests."""
    return await _render(request, services, account, exports.asked(request, services.clock))


@router.api_route("/usage/export", methods=["GET", "HEAD"])
async def export_usage(request: Request, services: Services, account: SignedIn) -> Response:
    """Every request of some days, or their sums, as a file."""
    form = exports.asked(request, services.clock)
    try:
        period = exports.period_of(form, services.clock)
    except InvalidPeriod as error:
        wrong = exports.wrong(form, error)
        return await _render(request, services, account, wrong, status_code=422)
    chosen = (services.sessions, account.organization_id)
    for group_by in exports.GROUPINGS:
        if form.value("by") == group_by:
            columns = (group_by, *LINE_COLUMNS)
            pages = lines(*chosen, group_by, period)
            return exports.answer(f"usage-by-{group_by}", form, period, columns, pages)
    return exports.answer("requests", form, period, REQUEST_COLUMNS, requests(*chosen, period))


async def _render(
    request: Request,
    services: WebServices,
    account: Account,
    form: FormState,
    *,
    status_code: int = 200,
) -> Response:
    settings = services.web_settings
    organization_id = account.organization_id
    async with read_only(services.sessions) as session:
        balance = await ledger.balance(session, organization_id)
        by_day = await usage.by_day(
            session, organization_id, settings.usage_days, clock=services.clock
        )
        records = await usage.recent(session, organization_id, settings.recent_requests)
        listed = [_listed(record) for record in records]
        snippets = await example_request(request, services, session)
    measure = MEASURES.get(request.query_params.get("by", ""), MEASURES["cost"])
    return get_pages(request).render(
        request,
        "usage.html",
        account.visitor,
        status_code=status_code,
        balance=balance,
        is_empty=not listed,
        chart=usage_chart(
            by_day,
            measure=measure,
            last_day=to_datetime(services.clock()).date(),
            num_days=settings.usage_days,
        ),
        measures=MEASURES.values(),
        requests=listed,
        export=form,
        groupings=exports.GROUPINGS,
        snippets=snippets,
    )


def _listed(record: UsageRecord) -> ListedRequest:
    return ListedRequest(
        request_id=record.request_id,
        created_at=record.created_at,
        model=record.model,
        input_tokens=record.input_tokens,
        cached_tokens=record.cached_input_tokens,
        output_tokens=record.output_tokens,
        ttft_us=record.ttft_us,
        finish=record.finish_reason or record.outcome,
        charge_nano_usd=record.charge_nano_usd,
    )
