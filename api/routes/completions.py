"""`POST /v1/completions`: the older form, for base models and the tools that count on it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import ServicesDependency
from api.errors import InvalidRequest
from api.formats.completions import CompletionFormat
from api.inference import Arrival, GenerationResponse, Limits, read, take_in
from api.openapi import body_of, errors
from api.schemas.completions import CompletionBody
from api.tokenizers import LoadedTokenizer
from common.ids import new_id

router = APIRouter(tags=["inference"])


@router.post(
    "/v1/completions",
    responses=errors(400, 401, 402, 403, 404, 413, 503),
    openapi_extra=body_of(CompletionBody),
)
async def create_completion(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Continue a text; streamed as server-sent events with `"stream": true`."""
    arrival = Arrival.now(services, principal)
    body = await read(request, CompletionBody, services)
    intake = await take_in(services, arrival, body)
    prompt_token_ids = await prompt_ids(intake.loaded, body.one_prompt)
    order = intake.order(new_id("cmpl"), prompt_token_ids, limits_of(body))
    return GenerationResponse(
        services, order, body.model, CompletionFormat, include_usage=body.include_usage
    )


def limits_of(body: CompletionBody) -> Limits:
    """What the body asks for beside its sampling."""
    return Limits(body.max_tokens, tuple(body.stop), body.n, body.logprobs)


async def prompt_ids(loaded: LoadedTokenizer, prompt: str | list[int]) -> list[int]:
    """The prompt as ids; ids are taken as they are. Raises InvalidRequest, PromptTooLong."""
    if isinstance(prompt, str):
        token_ids = await loaded.encode_text(prompt)
    else:
        token_ids = loaded.checked(prompt)
    if not token_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    return token_ids
