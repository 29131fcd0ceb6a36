"""`POST /v1/quote`: what a request would cost and how soon it would begin, without running it."""

from dataclasses import dataclass

from fastapi import APIRouter, Request

from api.authentication import InferenceCaller
from api.body import ParsedBody, read_object
from api.catalogue import Listing
from api.dependencies import Services, ServicesDependency
from api.inference import Arrival, Limits, take_in
from api.openapi import body_of, errors
from api.placement import Order, cost_model_of
from api.routes import chat_completions, completions, embeddings, messages, rerank, responses
from api.schemas.base import RequestBody, ResponseBody
from api.schemas.chat import ChatCompletionBody
from api.schemas.completions import CompletionBody
from api.schemas.embeddings import EmbeddingsBody
from api.schemas.messages import MessagesBody
from api.schemas.rerank import RerankBody
from api.schemas.responses import ResponsesBody
from billing import ledger
from billing.money import cost, format_usd
from common.db import read_only
from common.ids import new_id
from engine.messages import CostModel

router = APIRouter(tags=["inference"])


class AnyBody(RequestBody):
    """The body of any of the inference routes, exactly as it would be sent there."""

    model: str


class Quote(ResponseBody):
    """Exact where it can be: tokens and prices; the cache and the time are predictions."""

    object: str = "quote"
    model: str
    prompt_tokens: int
    cached_tokens_estimate: int
    max_completion_tokens: int
    """Of all choices together."""
    max_cost: str
    """Dollars, if nothing is cached and every choice runs to its limit; never more is charged."""
    expected_prompt_cost: str
    """Dollars for the prompt, if the estimate of the cache is right."""
    available: str
    is_covered: bool
    """Whether the credit covers the largest possible cost now."""
    predicted_ttft_ms: float | None
    """Waiting and prefill; None while no worker has told its pace, or nothing leaves the queue."""
    requests_waiting: int


@router.post(
    "/v1/quote",
    responses=errors(400, 401, 403, 404, 413, 415, 503),
    openapi_extra=body_of(AnyBody),
)
async def create_quote(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Quote:
    """The price and the wait of a body of any inference route.

    A body for an embedding model or a reranker is read as such. Of the others, one with `input` is
    read as a response, one with `prompt` as a completion, one with `messages` as a chat completion,
    or with the header `anthropic-version` as a message.
    """
    arrival = Arrival.now(services, principal)
    body = await read_object(request, services.settings)
    is_anthropic = "anthropic-version" in request.headers
    asked = await _pooled(services, arrival, body)
    if asked is None:
        asked = _asked(await _orders(services, arrival, body, is_anthropic))
    return await _quote(services, principal.organization_id, asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body would be charged for."""

    listing: Listing
    prompts: list[list[int]]
    num_output: int


def _asked(orders: list[Order]) -> _Asked:
    num_output = sum(order.num_choices * order.max_tokens for order in orders)
    return _Asked(orders[0].listing, [order.prompt_token_ids for order in orders], num_output)


async def _pooled(services: Services, arrival: Arrival, body: ParsedBody) -> _Asked | None:
    """What is asked of an embedding model or a reranker; None of any other."""
    listing = (await services.catalogue.listings()).get(str(body.content.get("model")))
    if listing is None or listing.model.kind == "generate":
        return None
    request_id = new_id("quote")
    if listing.model.kind == "rerank":
        pairs = await body.validated(RerankBody)
        order = await rerank.order_of(services, arrival, pairs, request_id)
    else:
        texts = await body.validated(EmbeddingsBody)
        order, _ = await embeddings.order_of(services, arrival, texts, request_id)
    return _Asked(listing, [each.token_ids for each in order.inputs], 0)


async def _orders(
    services: Services, arrival: Arrival, body: ParsedBody, is_anthropic: bool
) -> list[Order]:
    """The orders that the body would become."""
    request_id = new_id("quote")
    if "prompt" in body.content:
        completion = await body.validated(CompletionBody)
        intake = await take_in(services, arrival, completion)
        return await completions.orders_of(intake, completion, request_id)
    if "input" in body.content:
        response = await body.validated(ResponsesBody)
        limits = responses.limits_of(response)
        return await _chat_orders(services, arrival, response, limits, request_id)
    if is_anthropic:
        message = await body.validated(MessagesBody)
        limits = messages.limits_of(message)
        return await _chat_orders(services, arrival, message, limits, request_id)
    chat = await body.validated(ChatCompletionBody)
    limits = chat_completions.limits_of(chat)
    return await _chat_orders(services, arrival, chat, limits, request_id)


async def _chat_orders(
    services: Services,
    arrival: Arrival,
    body: ChatCompletionBody | MessagesBody | ResponsesBody,
    limits: Limits,
    request_id: str,
) -> list[Order]:
    intake = await take_in(services, arrival, body)
    return [await intake.chat_order(request_id, body.conversation(), limits)]


async def _quote(services: Services, tenant: str, asked: _Asked) -> Quote:
    listing, num_output = asked.listing, asked.num_output
    model = listing.model.name
    num_prompt = sum(map(len, asked.prompts))
    known = services.prefixes.num_known
    num_cached = sum(known(tenant, model, prompt) for prompt in asked.prompts)
    most = cost(listing.price, uncached_input=num_prompt, cached_input=0, output=num_output)
    prompt = cost(
        listing.price, uncached_input=num_prompt - num_cached, cached_input=num_cached, output=0
    )
    async with read_only(services.sessions) as session:
        available = (await ledger.balance(session, tenant)).available
    line = services.broker.end_of_line(model)
    cost_model = await cost_model_of(services, model)
    return Quote(
        model=model,
        prompt_tokens=num_prompt,
        cached_tokens_estimate=num_cached,
        max_completion_tokens=num_output,
        max_cost=format_usd(most),
        expected_prompt_cost=format_usd(prompt),
        available=format_usd(available),
        is_covered=available >= most,
        predicted_ttft_ms=_ttft_ms(cost_model, num_prompt, num_cached, line.eta_ms),
        requests_waiting=line.num_waiting,
    )


def _ttft_ms(
    cost_model: CostModel | None, num_prompt: int, num_cached: int, wait_ms: int | None
) -> float | None:
    if cost_model is None or wait_ms is None:
        return None
    work_s = cost_model.base_s + cost_model.work_s(num_prompt - num_cached, num_cached)
    return round(1_000 * work_s + wait_ms, 1)
