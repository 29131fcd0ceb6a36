"""`GET /v1/usage` and `GET /v1/generations/{id}`: what was used, and what it cost."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.authentication import AnyCaller
from api.dependencies import ServicesDependency
from api.errors import UnknownObject
from api.openapi import errors
from api.schemas.account import DailyUsageObject, GenerationObject, TimingObject, UsageAnswer
from api.summary import Timings
from billing import usage
from billing.money import format_usd
from billing.usage import DailyUsage, UsageRecord
from common.db import read_only

router = APIRouter(tags=["account"])


@router.get("/v1/usage", responses=errors(400, 401))
async def get_usage(
    services: ServicesDependency,
    principal: AnyCaller,
    days: Annotated[int, Query(ge=1, le=366)] = 30,
    limit: Annotated[int, Query(ge=0, le=1_000)] = 50,
) -> UsageAnswer:
    """Sums of the last `days` UTC days by day and model, and the last `limit` requests."""
    async with read_only(services.sessions) as session:
        by_day = await usage.by_day(session, principal.organization_id, days, clock=services.clock)
        recent = await usage.recent(session, principal.organization_id, limit)
        return UsageAnswer(
            days=[daily_usage(day) for day in by_day],
            recent=[generation_object(record) for record in recent],
        )


@router.get("/v1/generations/{request_id}", responses=errors(401, 404))
async def get_generation(
    request_id: str, services: ServicesDependency, principal: AnyCaller
) -> GenerationObject:
    """One closed request of the caller's organization, by the `id` of its answer."""
    async with read_only(services.sessions) as session:
        record = await usage.find(session, principal.organization_id, request_id)
        if record is None:
            raise UnknownObject("There is no such finished generation.")
        return generation_object(record)


def daily_usage(day: DailyUsage) -> DailyUsageObject:
    """Sums of a day in the words of the API."""
    return DailyUsageObject(
        day=day.day.isoformat(),
        model=day.model,
        requests=day.requests,
        prompt_tokens=day.input_tokens,
        cached_tokens=day.cached_tokens,
        completion_tokens=day.output_tokens,
        cost=format_usd(day.charge_nano_usd),
    )


def generation_object(record: UsageRecord) -> GenerationObject:
    """A closed request in the words of the API."""
    timings = Timings(
        ttft_us=record.ttft_us,
        queued_us=record.queued_us,
        prefill_us=record.prefill_us,
        decode_us=record.decode_us,
        behind_own_us=record.behind_own_us,
        behind_others_us=record.behind_others_us,
        tenants_active=record.tenants_active,
        draft_tokens=record.draft_tokens,
        accepted_draft_tokens=record.accepted_draft_tokens,
    )
    return GenerationObject(
        id=record.request_id,
        model=record.model,
        created=record.created_at // 1_000_000,
        outcome=record.outcome,
        finish_reason=record.finish_reason,
        is_streamed=record.is_streamed,
        prompt_tokens=record.input_tokens,
        cached_tokens=record.cached_input_tokens,
        completion_tokens=record.output_tokens,
        cost=format_usd(record.charge_nano_usd),
        api_key_id=record.api_key_id,
        worker=record.worker,
        attempts=record.attempts,
        timing=TimingObject(**timings.as_json(record.output_tokens)),
    )
