"""A validated request gets its credit held and its place in the queue, at the same time.

The request enters the queue unconfirmed while the hold is being committed, and no worker may take
it before the committed hold confirms it: compute never runs ahead of money.
"""

import asyncio
from dataclasses import dataclass

import msgspec
import structlog

from accounts.principal import Principal
from api.catalogue import Listing
from api.dependencies import Services
from billing.hold_operations import AdmitHold, Hold
from common.errors import PlatformError
from engine.broker.stream import RequestStream
from engine.messages import CostModel, GenerateRequest, Sampling
from engine.tokenization import Tokenizer

log = structlog.get_logger()

UNCALIBRATED = CostModel(base_s=0.01, per_token_s=1e-4, per_context_s=1e-8)
"""Orders requests by length until a worker has told its own."""


@dataclass(frozen=True, slots=True)
class Order:
    """One inference request: validated, tokenized, and not yet paid for."""

    request_id: str
    principal: Principal
    listing: Listing
    tokenizer: Tokenizer
    prompt_token_ids: list[int]
    sampling: Sampling
    num_choices: int
    max_tokens: int
    """Of each choice; prompt and output together fit the context."""
    stop_strings: tuple[str, ...]
    is_streamed: bool
    arrived_at_us: int
    """UTC."""
    arrived_at_s: float
    """Of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A request that is paid for and queued."""

    request: GenerateRequest
    hold: Hold
    stream: RequestStream


async def place(services: Services, order: Order) -> Placement:
    """Hold the credit and queue the request; all of it, or nothing.

    Raises InsufficientCredit, KeyRevoked, OrganizationFrozen, ModelUnavailable.
    """
    request = await _engine_request(services, order)
    submitting = services.running.start(services.broker.submit(request, confirmed=False))
    try:
        hold = await services.hold_writer.admit(_hold_request(services, order))
    except BaseException:
        services.running.start(_take_back(submitting))
        raise
    try:
        stream = await submitting
        if hold.authorized_output_tokens < order.num_choices * order.max_tokens:
            stream = await _submit_less(services, stream, hold)
        else:
            await services.broker.confirm(stream.request)
    except BaseException:
        services.running.start(_take_back(submitting))
        services.running.start(_void(services, hold))
        raise
    return Placement(stream.request, hold, stream)


async def _engine_request(services: Services, order: Order) -> GenerateRequest:
    model = order.listing.model.name
    work_s = await _prefill_s(services, order)
    return GenerateRequest(
        request_id=order.request_id,
        model=model,
        node=services.broker.node,
        tenant=order.principal.organization_id,
        prompt_token_ids=order.prompt_token_ids,
        sampling=order.sampling,
        authorized_tokens=order.max_tokens,
        arrival_ms=order.arrived_at_us // 1_000,
        # Shortest prefill first, with linear ageing. Comparing aged priorities
        # `work - alpha · (now - arrival)` cancels `alpha · now`: keys never need refreshing.
        key=work_s + services.settings.priority_alpha * order.arrived_at_us / 1e6,
        work_s=work_s,
        num_choices=order.num_choices,
    )


async def _prefill_s(services: Services, order: Order) -> float:
    """Predicted seconds of the whole prefill, by the cost model of a worker of this model."""
    heartbeats = await services.broker.heartbeats(order.listing.model.name)
    known = (beat.cost_model for beat in heartbeats if beat.cost_model is not None)
    cost_model = next(known, UNCALIBRATED)
    return cost_model.prefill_s(len(order.prompt_token_ids))


def _hold_request(services: Services, order: Order) -> AdmitHold:
    assert order.principal.api_key_id is not None
    return AdmitHold(
        request_id=order.request_id,
        organization_id=order.principal.organization_id,
        api_key_id=order.principal.api_key_id,
        model=order.listing.model.name,
        price_id=order.listing.price.id,
        gateway=services.gateway_id,
        input_tokens=len(order.prompt_token_ids),
        output_tokens=order.num_choices * order.max_tokens,
        num_choices=order.num_choices,
    )


async def _submit_less(services: Services, stream: RequestStream, hold: Hold) -> RequestStream:
    """Queue the request anew with the smaller fence that the credit covers.

    Nobody can have taken it meanwhile: it was not confirmed.
    """
    request = stream.request
    fenced = msgspec.structs.replace(
        request, authorized_tokens=hold.authorized_output_tokens // request.num_choices
    )
    await stream.cancel()
    return await services.broker.submit(fenced, confirmed=True)


async def _take_back(submitting: asyncio.Task[RequestStream]) -> None:
    """Withdraw a request that will not be paid for, once its submission has ended."""
    try:
        stream = await submitting
        await stream.cancel()
    except PlatformError as error:
        # Not queued, or the queue is out of reach: unconfirmed requests expire there by themselves.
        log.info("withdrawal_failed", code=error.code)


async def _void(services: Services, hold: Hold) -> None:
    """Release a hold whose request was never queued."""
    await services.hold_writer.void(hold.request_id, hold.epoch, "platform_fault")
