"""Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import ServicesDependency
from api.formats.messages import MessagesFormat
from api.inference import Arrival, GenerationResponse, Limits, read, take_in
from api.openapi import ANTHROPIC_ERROR, body_of, errors
from api.routes.direct import DirectRoute
from api.schemas.base import ResponseBody
from api.schemas.messages import CountTokensBody, MessagesBody
from common.ids import new_id

router = APIRouter(tags=["inference"], route_class=DirectRoute)
counting = APIRouter(tags=["inference"])


class TokenCount(ResponseBody):
    """How long a prompt is; asking costs nothing."""

    input_tokens: int


@router.post(
    "/v1/messages",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503, form=ANTHROPIC_ERROR),
    openapi_extra=body_of(MessagesBody),
)
async def create_message(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Continue a conversation in Anthropic's protocol, streamed as named events."""
    arrival = Arrival.now(services, principal)
    body = await read(request, MessagesBody, services)
    intake = await take_in(services, arrival, body)
    order = await intake.chat_order(new_id("msg"), body.conversation(), limits_of(body))
    return GenerationResponse(services, [order], body.model, MessagesFormat)


def limits_of(body: MessagesBody) -> Limits:
    """What the body asks for beside its sampling."""
    return Limits(body.max_tokens, tuple(body.stop_sequences))


@counting.post(
    "/v1/messages/count_tokens",
    responses=errors(400, 401, 403, 404, 413, 415, form=ANTHROPIC_ERROR),
    openapi_extra=body_of(CountTokensBody),
)
async def count_tokens(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> TokenCount:
    """The exact length of a prompt, as `/v1/messages` would count it."""
    body = await read(request, CountTokensBody, services)
    listing = await services.catalogue.find(body.model)
    loaded = await services.tokenizers.get(listing.text_model)
    return TokenCount(input_tokens=len(await loaded.encode_chat(body.conversation())))
