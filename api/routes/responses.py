"""OpenAI's `POST /v1/responses`, without a store: every request brings its whole conversation."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import ServicesDependency
from api.formats import AnswerHead
from api.formats.responses import ResponsesFormat
from api.inference import Arrival, GenerationResponse, Limits, read, take_in
from api.openapi import body_of, errors
from api.routes.direct import DirectRoute
from api.schemas.responses import ResponsesBody
from common.ids import new_id

router = APIRouter(tags=["inference"], route_class=DirectRoute)


@router.post(
    "/v1/responses",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503),
    openapi_extra=body_of(ResponsesBody),
)
async def create_response(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Answer input items with output items; streamed as typed events with `"stream": true`."""
    arrival = Arrival.now(services, principal)
    body = await read(request, ResponsesBody, services)
    intake = await take_in(services, arrival, body)
    order = await intake.chat_order(new_id("resp"), body.conversation(), limits_of(body))
    echo = echoed(body)

    def format_of(head: AnswerHead) -> ResponsesFormat:
        return ResponsesFormat(head, echo)

    return GenerationResponse(services, [order], body.model, format_of)


def limits_of(body: ResponsesBody) -> Limits:
    """What the body asks for beside its sampling."""
    return Limits(body.max_output_tokens, num_logprobs=body.num_logprobs)


def echoed(body: ResponsesBody) -> dict[str, Any]:
    """The parameters that a response repeats."""
    choice = body.tool_choice
    return {
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "temperature": body.temperature,
        "text": {"format": body.text.format.model_dump(by_alias=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": body.top_p,
    }
