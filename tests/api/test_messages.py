"""Anthropic's protocol: its shapes, its events, its errors, and its own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.conftest import MODEL, Platform
from tests.api.test_tools import NATIVE

TOOL = {
    "name": "get_weather",
    "description": "The weather somewhere",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def ask(platform: Platform, content: Any = "Hi", **parameters: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": content}]}
    return await platform.post("/v1/messages", body | parameters)


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Name and data of each event, comments left out."""
    found = []
    for block in response.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_whole_message_has_anthropic_s_shape(platform: Platform) -> None:
    platform.say("Hello, Ada", num_cached_tokens=2)
    answer = (await ask(platform)).json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": "Hello, Ada"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    counted = await platform.post(
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    )
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert total == counted.json()["input_tokens"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["output_tokens"] == len(platform.ids("Hello, Ada")) + 1
    assert usage["cost"]
    assert answer["timing"]["ttft_ms"] > 0


async def test_the_events_of_a_stream_come_in_order_and_by_name(platform: Platform) -> None:
    platform.say("Hello, Ada")
    found = named_events(await ask(platform, stream=True))
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert all(name == data["type"] for name, data in found)
    start = found[0][1]["message"]
    assert start["usage"]["input_tokens"] > 0, "sglang#20678: the true count, and not 0"
    assert start["stop_sequence"] is None
    text = "".join(d["delta"]["text"] for n, d in found if n == "content_block_delta")
    assert text == "Hello, Ada"
    end = found[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len(platform.ids("Hello, Ada")) + 1


@pytest.mark.parametrize(
    ("parameters", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "Ada"]}, "stop_sequence", "Ada"),
    ],
)
async def test_the_reason_for_the_end_is_told(
    platform: Platform, parameters: dict[str, Any], reason: str, sequence: str | None
) -> None:
    platform.say("Hello, Ada and all the others")
    answer = (await ask(platform, **parameters)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


async def test_calls_are_blocks_and_their_results_come_back(platform: Platform) -> None:
    platform.say(NATIVE)
    answer = (await ask(platform, tools=[TOOL])).json()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert answer["content"][1]["input"] == {"city": "Bern"}
    assert answer["stop_reason"] == "tool_use"
    found = named_events(await ask(platform, tools=[TOOL], stream=True))
    starts = [data for name, data in found if name == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2]
    assert starts[1]["content_block"]["input"] == {}
    parts = [d for n, d in found if n == "content_block_delta" and d["index"] == 2]
    assert {part["delta"]["type"] for part in parts} == {"input_json_delta"}
    assert all(part["delta"]["partial_json"] for part in parts)
    text = "".join(part["delta"]["partial_json"] for part in parts)
    assert json.loads(text) == {"city": "Basel"}
    platform.say("Rain.")
    call = answer["content"][1]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": answer["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    response = await platform.post(
        "/v1/messages",
        {"model": MODEL, "max_tokens": 9, "messages": messages, "tools": [TOOL]},
    )
    assert response.status_code == 200, response.text


async def test_a_last_turn_of_the_assistant_is_continued(platform: Platform) -> None:
    platform.say(" world")
    messages = [
        {"role": "user", "content": "Say hello world"},
        {"role": "assistant", "content": "Hello"},
    ]
    body = {"model": MODEL, "max_tokens": 9, "messages": messages}
    assert (await platform.post("/v1/messages", body)).status_code == 200
    prompt = platform.worker.requests[-1].prompt_token_ids
    assert tuple(prompt[-1:]) == platform.ids("Hello")[-1:]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"temperature": 9}, 400, "invalid_request_error"),
        ({"model": "no/such"}, 404, "not_found_error"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
        ),
    ],
)
async def test_errors_have_anthropic_s_form(
    platform: Platform, body: dict[str, Any], status: int, kind: str
) -> None:
    response = await ask(platform, **body)
    assert response.status_code == status
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]


async def test_a_stranger_and_an_empty_account_hear_it_in_anthropic_s_form(
    platform: Platform,
) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    stranger = await platform.client.post("/v1/messages", json=body)
    assert stranger.status_code == 401
    assert stranger.json()["error"]["type"] == "authentication_error"
    await platform.set_balance(platform.customer, 0)
    spent = await ask(platform)
    assert (spent.status_code, spent.json()["error"]["type"]) == (402, "billing_error")
    assert spent.headers["x-should-retry"] == "false"


async def test_an_error_in_a_stream_is_an_error_event(platform: Platform) -> None:
    platform.say("half", end="error")
    found = named_events(await ask(platform, stream=True))
    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["type"] == "overloaded_error"


async def test_a_key_may_come_as_anthropic_s_clients_send_it(platform: Platform) -> None:
    platform.say("Hello")
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"x-api-key": platform.customer.key}
    response = await platform.client.post("/v1/messages", json=body, headers=headers)
    assert response.status_code == 200, response.text


@pytest.fixture
async def client(platform: Platform, base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=platform.customer.key) as made:
        yield made


async def test_anthropic_s_client_works(
    platform: Platform, client: anthropic.AsyncAnthropic
) -> None:
    platform.say(NATIVE)
    messages: Any = [{"role": "user", "content": "Hi"}]
    tools: Any = [TOOL]
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": tools}
    whole = await client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    calls = [block.input for block in final.content if block.type == "tool_use"]
    assert calls == [{"city": "Bern"}, {"city": "Basel"}]
    assert final.usage.input_tokens == whole.usage.input_tokens
    models = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in models] == [
        (MODEL, "model", MODEL)
    ]
    counted = await client.messages.count_tokens(model=MODEL, messages=messages, tools=tools)
    assert counted.input_tokens == whole.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="no/such", max_tokens=5, messages=messages)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(
            model=MODEL, max_tokens=5, messages=messages, extra_body={"temperature": 9}
        )


async def test_anthropic_s_sync_client_streams(platform: Platform, base_url: str) -> None:
    platform.say("Hello, Ada")

    def listen() -> str:
        with (
            anthropic.Anthropic(base_url=base_url, api_key=platform.customer.key) as client,
            client.messages.stream(
                model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "Hi"}]
            ) as stream,
        ):
            return "".join(stream.text_stream)

    assert await asyncio.to_thread(listen) == "Hello, Ada"
