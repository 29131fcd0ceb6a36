"""`POST /v1/completions`: the older form, for base models and the tools that count on it."""

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import ServicesDependency
from api.errors import InvalidRequest
from api.formats import AnswerHead
from api.formats.completions import CompletionFormat
from api.inference import Arrival, GenerationResponse, Intake, Limits, read, take_in
from api.openapi import body_of, errors
from api.placement import Order
from api.routes.direct import DirectRoute
from api.schemas.completions import CompletionBody
from api.tokenizers import LoadedTokenizer
from common.ids import new_id

router = APIRouter(tags=["inference"], route_class=DirectRoute)


@router.post(
    "/v1/completions",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503),
    openapi_extra=body_of(CompletionBody),
)
async def create_completion(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Continue a text; streamed as server-sent events with `"stream": true`."""
    arrival = Arrival.now(services, principal)
    body = await read(request, CompletionBody, services)
    intake = await take_in(services, arrival, body)
    orders = await orders_of(intake, body, new_id("cmpl"))
    echoes = await echoes_of(intake.loaded, body) if body.echo else ()

    def format_of(head: AnswerHead) -> CompletionFormat:
        shown = replace(head, has_logprobs=body.logprobs is not None)
        return CompletionFormat(shown, echoes, num_best=body.n if body.is_contest else None)

    return GenerationResponse(
        services, orders, body.model, format_of, include_usage=body.include_usage
    )


async def orders_of(intake: Intake, body: CompletionBody, request_id: str) -> list[Order]:
    """An order for each prompt; the ids of all but the first have its number behind a dash.

    Raises InvalidRequest, PromptTooLong.
    """
    num_logprobs = body.logprobs
    if body.is_contest and num_logprobs is None:
        num_logprobs = 0  # what the contest is decided by
    limits = Limits(
        body.max_tokens, tuple(body.stop), body.best_of or body.n, num_logprobs, body.scoring
    )
    orders = []
    for number, prompt in enumerate(body.prompts):
        token_ids = await prompt_ids(intake.loaded, prompt, body.suffix)
        own_id = f"{request_id}-{number}" if number else request_id
        orders.append(intake.order(own_id, token_ids, limits))
    return orders


async def echoes_of(loaded: LoadedTokenizer, body: CompletionBody) -> list[str]:
    """The text of the prompt of each choice."""
    texts = [
        prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt)
        for prompt in body.prompts
    ]
    return [text for text in texts for _ in range(body.n)]


async def prompt_ids(
    loaded: LoadedTokenizer, prompt: str | list[int], suffix: str = ""
) -> list[int]:
    """The prompt as ids; ids are taken as they are. Raises InvalidRequest, PromptTooLong."""
    if isinstance(prompt, str):
        token_ids = await loaded.encode_text(prompt)
    else:
        token_ids = loaded.checked(prompt)
    if suffix:
        return await loaded.encode_infill(token_ids, suffix)
    if not token_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    return token_ids
