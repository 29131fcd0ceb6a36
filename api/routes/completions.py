"""`POST /v1/completions`: the older form, for base models and the tools that count on it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.errors import InvalidRequest
from api.formats import CompletionFormat
from api.inference import Arrival, GenerationResponse, order_of
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
    arrival = Arrival.now(services)
    services.running.require_open()
    body = await read_json(request, CompletionBody, services.settings)
    listing = await services.catalogue.find(body.model)
    loaded = await services.tokenizers.get(listing.model)
    order = order_of(
        body,
        request_id=new_id("cmpl"),
        arrival=arrival,
        principal=principal,
        listing=listing,
        tokenizer=loaded.tokenizer,
        prompt_token_ids=await prompt_ids(loaded, body.one_prompt),
        output_limit=body.output_limit,
        num_logprobs=body.logprobs,
    )
    return GenerationResponse(services, order, body, CompletionFormat)


async def prompt_ids(loaded: LoadedTokenizer, prompt: str | list[int]) -> list[int]:
    """The prompt as ids; ids are taken as they are. Raises InvalidRequest, PromptTooLong."""
    if isinstance(prompt, str):
        token_ids = await loaded.encode_text(prompt)
    else:
        token_ids = loaded.checked(prompt)
    if not token_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    return token_ids
