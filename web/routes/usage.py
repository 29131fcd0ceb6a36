"""What was used and what it cost."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from billing import ledger, usage
from billing.models import UsageRecord
from common.clock import to_datetime
from common.db import read_only
from web.charts import MEASURES, usage_chart
from web.dependencies import Services, SignedIn
from web.pages import get_pages
from web.routes.examples import example_request

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
    settings = services.web_settings
    organization_id = account.organization_id
    async with read_only(services.sessions) as session:
        balance = await ledger.balance(session, organization_id)
        by_day = await usage.by_day(
            session, organization_id, settings.usage_days, clock=services.clock
        )
        records = await usage.recent(session, organization_id, settings.recent_requests)
        requests = [_listed(record) for record in records]
        snippets = await example_request(request, services, session)
    measure = MEASURES.get(request.query_params.get("by", ""), MEASURES["cost"])
    return get_pages(request).render(
        request,
        "usage.html",
        account.visitor,
        balance=balance,
        is_empty=not requests,
        chart=usage_chart(
            by_day,
            measure=measure,
            last_day=to_datetime(services.clock()).date(),
            num_days=settings.usage_days,
        ),
        measures=MEASURES.values(),
        requests=requests,
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
