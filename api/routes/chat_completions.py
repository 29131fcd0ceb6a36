"""`POST /v1/chat/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.formats import ChatFormat
from api.inference import Arrival, GenerationResponse, order_of
from api.openapi import body_of, errors
from api.schemas.chat import ChatCompletionBody
from common.ids import new_id

router = APIRouter(tags=["inference"])


@router.post(
    "/v1/chat/completions",
    responses=errors(400, 401, 402, 403, 404, 413, 503),
    openapi_extra=body_of(ChatCompletionBody),
)
async def create_chat_completion(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Continue a conversation; streamed as server-sent events with `"stream": true`."""
    arrival = Arrival.now(services)
    services.running.require_open()
    body = await read_json(request, ChatCompletionBody, services.settings)
    listing = await services.catalogue.find(body.model)
    loaded = await services.tokenizers.get(listing.model)
    messages = [message.for_template() for message in body.messages]
    order = order_of(
        body,
        request_id=new_id("chatcmpl"),
        arrival=arrival,
        principal=principal,
        listing=listing,
        tokenizer=loaded.tokenizer,
        prompt_token_ids=await loaded.encode_chat(messages),
        output_limit=body.output_limit or services.settings.default_max_tokens,
        num_logprobs=body.num_logprobs,
    )
    return GenerationResponse(services, order, body, ChatFormat)
