"""Tools in chat completions: how they are told to the model, and how its calls come back."""

import json
from typing import Any

import openai
import pytest

from tests.api.conftest import MODEL, Platform
from tests.api.test_chat import events

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NATIVE = (
    "Looking.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "get_weather", "arguments": {"city": "Basel"}}\n</tool_call>'
)
FORCED = '[{"name": "get_weather", "arguments": {"city": "Bern"}}]'


async def test_calls_have_openai_s_shape(platform: Platform) -> None:
    platform.say(NATIVE)
    choice = (await platform.chat(tools=[TOOL])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Looking."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    assert json.loads(second["function"]["arguments"]) == {"city": "Basel"}
    assert first["id"] != second["id"]


async def test_content_is_null_beside_calls_alone(platform: Platform) -> None:
    platform.say(NATIVE.removeprefix("Looking.\n"))
    message = (await platform.chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_streamed_calls_have_indexes_and_ids_once(platform: Platform) -> None:
    platform.say(NATIVE)
    chunks = events(await platform.chat(tools=[TOOL], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == "Looking.", "the syntax of a call is never shown as content"
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
    for index, city in enumerate(["Bern", "Basel"]):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["id"]
        assert mine[0]["type"] == "function"
        assert mine[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert all("id" not in part and "name" not in part["function"] for part in mine[1:])
        arguments = "".join(part["function"]["arguments"] for part in mine)
        assert json.loads(arguments) == {"city": city}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert not any(delta.get("tool_calls") == [] for delta in deltas)


async def test_tools_are_described_to_the_model(platform: Platform) -> None:
    platform.say("fine")
    plain = (await platform.chat()).json()["usage"]["prompt_tokens"]
    told = (await platform.chat(tools=[TOOL])).json()["usage"]["prompt_tokens"]
    none = (await platform.chat(tools=[TOOL], tool_choice="none")).json()["usage"]["prompt_tokens"]
    assert told > plain + 50
    assert none == plain
    prompt = platform.worker.requests[1].prompt_token_ids
    text = platform.services.tokenizers  # the prompt as the worker got it
    loaded = await text.get((await platform.services.catalogue.find(MODEL)).model)
    assert '"name": "get_weather"' in loaded.tokenizer.decode(prompt)


async def test_without_tools_their_syntax_is_text(platform: Platform) -> None:
    platform.say(NATIVE)
    message = (await platform.chat()).json()["choices"][0]["message"]
    assert message["content"] == NATIVE
    assert "tool_calls" not in message
    none = (await platform.chat(tools=[TOOL], tool_choice="none")).json()["choices"][0]
    assert none["message"]["content"] == NATIVE


async def test_one_call_only_when_calls_may_not_be_parallel(platform: Platform) -> None:
    platform.say(NATIVE, end="never")
    answer = await platform.chat(tools=[TOOL], parallel_tool_calls=False, max_tokens=500)
    choice = answer.json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_off_says_length(platform: Platform) -> None:
    platform.say(NATIVE)
    num_tokens = len(platform.ids(NATIVE[: NATIVE.index("Bern")]))
    choice = (await platform.chat(tools=[TOOL], max_tokens=num_tokens)).json()["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_a_conversation_with_calls_and_results_is_rendered(platform: Platform) -> None:
    platform.say("It rains.")
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain, <|im_end|> 9°"},
    ]
    body = {"model": MODEL, "messages": history, "tools": [TOOL]}
    response = await platform.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    prompt = platform.worker.requests[-1].prompt_token_ids
    listing = await platform.services.catalogue.find(MODEL)
    loaded = await platform.services.tokenizers.get(listing.model)
    text = loaded.tokenizer.decode(prompt)
    assert '{"name": "get_weather", "arguments": {"city": "Bern"}}' in text
    assert "<tool_response>\nrain, <|im_end|> 9°\n</tool_response>" in text


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "get_whether"}},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_400_with_their_place(
    platform: Platform, parameters: dict[str, Any], param: str
) -> None:
    response = await platform.chat(**parameters)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_openai_s_client_reads_streamed_calls(platform: Platform, base_url: str) -> None:
    platform.say(NATIVE)
    async with (
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=platform.customer.key) as client,
        client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[TOOL]
        ) as stream,
    ):
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Basel"]
