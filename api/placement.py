"""A validated request gets its credit held, then its place in the queue.

No worker can know of it before the hold is committed: compute never runs ahead of money. While the
database commits, the message to the workers is written.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from accounts.principal import Principal
from api.catalogue import Listing
from api.dependencies import Services
from api.outputs.reading import PLAIN, Reading
from api.prompt_scoring import NO_SCORING, ScoringWish
from billing.hold_operations import AdmitHold, Hold, Outcome, Owner
from engine.broker.gateway import GatewayBroker, Submission
from engine.broker.stream import RequestStream
from engine.cost_model import UNCALIBRATED, queue_price
from engine.messages import CostModel, GenerateRequest, Sampling, Structure
from engine.tokenization import Tokenizer

LEAST_SAMPLED = 1
"""A prefill ends with a token, even where nobody asked for one: it is neither shown nor billed."""


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
    """Of each choice; prompt and output together fit the context. 0: the prompt alone is asked about."""
    stop_strings: tuple[str, ...]
    is_streamed: bool
    arrived_at_us: int
    """UTC."""
    arrived_at_s: float
    """Of the monotonic clock."""
    reading: Reading = PLAIN
    """How the text is to be read."""
    structure: Structure | None = None
    """The form that it must have."""
    scoring: ScoringWish = NO_SCORING
    """What is to be told of the prompt."""

    @property
    def owner(self) -> Owner:
        """Who pays for it."""
        return Owner(self.principal.organization_id, self.principal.api_key_id)

    @property
    def form_param(self) -> str:
        """The field of the body that the form comes from."""
        is_of_tools = self.structure is not None and self.structure.kind == "structural_tag"
        return "tools" if is_of_tools or self.reading.is_forced else "response_format"


@dataclass(frozen=True, slots=True)
class Placement:
    """A request that is paid for and queued."""

    request: GenerateRequest
    hold: Hold
    stream: RequestStream


async def place(services: Services, order: Order) -> Placement:
    """Hold the credit of the first slice, then queue the request; all of it, or nothing.

    Whoever is cancelled meanwhile leaves nothing behind. Raises InsufficientCredit, KeyRevoked,
    OrganizationFrozen, ModelUnavailable.
    """
    cost_model = await cost_model_of(services, order.listing.model.name) or UNCALIBRATED
    admitting = services.hold_writer.begin(_hold_request(services, order))
    try:
        # The hold is on its way to the database before anything else is done.
        await asyncio.sleep(0)
        submission = services.broker.prepare(_engine_request(services, order, cost_model))
        hold = await admitting
    except BaseException:
        services.hold_writer.abandon(admitting)
        raise
    try:
        stream = await services.broker.submit(_within(hold, submission, services.broker))
    except BaseException as error:
        is_aborted = isinstance(error, asyncio.CancelledError)
        outcome: Outcome = "aborted" if is_aborted else "platform_fault"
        services.running.start(_void(services, hold, outcome, order.owner))
        raise
    request = stream.request
    services.prefixes.note(request.tenant, request.model, request.prompt_token_ids)
    return Placement(request, hold, stream)


def _within(hold: Hold, submission: Submission, broker: GatewayBroker) -> Submission:
    """The same up to the fence that the hold covers, where it covers less than was asked for."""
    request = submission.request
    fence = max(hold.authorized_output_tokens // request.num_choices, LEAST_SAMPLED)
    if fence == request.authorized_tokens:
        return submission
    return broker.prepare(msgspec.structs.replace(request, authorized_tokens=fence))


def _engine_request(services: Services, order: Order, cost_model: CostModel) -> GenerateRequest:
    arrival_ms = order.arrived_at_us // 1_000
    price = queue_price(
        cost_model,
        len(order.prompt_token_ids),
        arrival_ms=arrival_ms,
        alpha=services.settings.priority_alpha,
    )
    return GenerateRequest(
        request_id=order.request_id,
        model=order.listing.model.name,
        node=services.broker.node,
        tenant=order.principal.organization_id,
        prompt_token_ids=order.prompt_token_ids,
        sampling=order.sampling,
        authorized_tokens=max(_first_slice(services, order), LEAST_SAMPLED),
        max_tokens=max(order.max_tokens, LEAST_SAMPLED),
        arrival_ms=arrival_ms,
        key=price.key,
        work_s=price.work_s,
        num_choices=order.num_choices,
        structure=order.structure,
    )


async def cost_model_of(services: Services, model: str) -> CostModel | None:
    """What a worker of this model has measured; None until one has spoken."""
    heartbeats = await services.broker.heartbeats(model)
    known = (beat.cost_model for beat in heartbeats if beat.cost_model is not None)
    return next(known, None)


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
        output_tokens=order.num_choices * _first_slice(services, order),
        num_choices=order.num_choices,
    )


def _first_slice(services: Services, order: Order) -> int:
    """Output tokens of each choice that are held before anything runs; the rest follows."""
    return min(order.max_tokens, services.billing_settings.slice_tokens)


async def _void(services: Services, hold: Hold, outcome: Outcome, owner: Owner) -> None:
    """Release a hold whose request was not queued, or has been withdrawn at once."""
    await services.hold_writer.void(hold.request_id, hold.epoch, outcome, owner=owner)
