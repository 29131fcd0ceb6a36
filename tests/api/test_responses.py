"""OpenAI's responses: items, typed events, and their own client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.api.conftest import MODEL, Platform
from tests.api.test_tools import FORCED, NATIVE

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def respond(platform: Platform, given: Any = "Hi", **parameters: Any) -> httpx.Response:
    return await platform.post("/v1/responses", {"model": MODEL, "input": given} | parameters)


def typed_events(response: httpx.Response) -> list[Any]:
    found = []
    for block in response.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            found.append(event)
    return found


async def test_a_whole_response_has_openai_s_shape(platform: Platform) -> None:
    platform.say("Hello, Ada")
    answer = (await respond(platform, instructions="Be kind.", metadata={"a": "b"})).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"]) == ("response", "completed")
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello, Ada", "annotations": [], "logprobs": []}
    ]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["cost"]
    assert answer["timing"]["ttft_ms"] > 0
    assert answer["metadata"] == {"a": "b"}
    cut = (await respond(platform, max_output_tokens=2)).json()
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_events_are_typed_numbered_and_in_order(platform: Platform) -> None:
    platform.say(NATIVE)
    events = typed_events(await respond(platform, tools=[TOOL], stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-1] == "completed"
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert [event["item"]["type"] for event in added] == ["message", *["function_call"] * 2]
    assert added[0]["item"]["content"] == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert done[0]["content"][0]["text"] == "Looking."
    assert [json.loads(item["arguments"])["city"] for item in done[1:]] == ["Bern", "Basel"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "Looking."


async def test_calls_and_their_results_come_back_as_items(platform: Platform) -> None:
    platform.say("It rains.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "sun"},
    ]
    response = await respond(platform, items, tools=[TOOL])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "hiccup"}}}}, None),
    ],
)
async def test_wrong_values_are_400(
    platform: Platform, parameters: dict[str, Any], param: str | None
) -> None:
    response = await platform.post("/v1/responses", {"model": MODEL, "input": "x"} | parameters)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_a_failed_stream_says_so(platform: Platform) -> None:
    platform.say("half", end="error")
    events = typed_events(await respond(platform, stream=True))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]


@pytest.fixture
async def client(platform: Platform, base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=platform.customer.key) as made:
        yield made


class Answer(BaseModel):
    city: str
    days: int


async def test_openai_s_client_reads_responses(
    platform: Platform, client: openai.AsyncOpenAI
) -> None:
    platform.say(NATIVE)
    asked: Any = {"model": MODEL, "input": "Hi", "tools": [TOOL]}
    whole = await client.responses.create(**asked)
    assert whole.output_text == "Looking."
    async with client.responses.stream(**asked) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Looking."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Bern", "Basel"]
    platform.say('{"city": "Bern", "days": 3}')
    parsed = await client.responses.parse(model=MODEL, input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(city="Bern", days=3)
    structure = platform.worker.requests[-1].structure
    assert structure is not None
    assert json.loads(structure.source)["required"] == ["city", "days"]


async def test_a_forced_call_is_read_whatever_the_family_writes(platform: Platform) -> None:
    platform.say(FORCED)
    answer = (await respond(platform, tools=[TOOL], tool_choice="required")).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["output"][0]["name"] == "get_weather"
