"""`POST /v1/chat/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import ServicesDependency
from api.formats.chat import ChatFormat
from api.inference import Arrival, GenerationResponse, Limits, read, take_in
from api.openapi import body_of, errors
from api.prompt_scoring import ScoringWish
from api.routes.direct import DirectRoute
from api.schemas.chat import ChatCompletionBody
from common.ids import new_id

router = APIRouter(tags=["inference"], route_class=DirectRoute)


@router.post(
    "/v1/chat/completions",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503),
    openapi_extra=body_of(ChatCompletionBody),
)
async def create_chat_completion(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Continue a conversation; streamed as server-sent events with `"stream": true`."""
    arrival = Arrival.now(services, principal)
    body = await read(request, ChatCompletionBody, services)
    intake = await take_in(services, arrival, body)
    order = await intake.chat_order(new_id("chatcmpl"), body.conversation(), limits_of(body))
    return GenerationResponse(
        services, [order], body.model, ChatFormat, include_usage=body.include_usage
    )


def limits_of(body: ChatCompletionBody) -> Limits:
    """What the body asks for beside its sampling."""
    scoring = ScoringWish(body.prompt_logprobs)
    return Limits(body.output_limit, tuple(body.stop), body.n, body.num_logprobs, scoring)
