"""Forms that an answer must have: what reaches the worker, and what never does."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.api.conftest import MODEL, Platform
from tests.api.test_chat import events
from tests.api.test_tools import FORCED, TOOL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def strict(schema: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True} | more
    return {"type": "json_schema", "json_schema": named}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("wanted", "kind", "source"),
    [
        (strict(SCHEMA), "json_schema", json.dumps(SCHEMA)),
        ({"type": "json_object"}, "json_schema", '{"type": "object"}'),
        ({"type": "regex", "pattern": "[a-z]+"}, "regex", "[a-z]+"),
        ({"type": "grammar", "grammar": 'root ::= "x"'}, "ebnf", 'root ::= "x"'),
    ],
)
async def test_forms_reach_the_worker(
    platform: Platform, wanted: Any, kind: str, source: str
) -> None:
    platform.say('{"a": 1}')
    answer = await platform.chat(response_format=wanted)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    structure = platform.worker.requests[-1].structure
    assert structure is not None
    assert (structure.kind, structure.source) == (kind, source)


@pytest.mark.parametrize(
    "wanted",
    [
        strict({"type": "hiccup"}),
        strict(nested(400)),
        strict({"type": "string", "pattern": "(" * 3_000}),
        strict({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        strict({"allOf": [{"type": "integer"}, {"minimum": 3}]}),
        strict({"$ref": "https://example.com/schema"}),
        strict({"enum": ["x" * 100] * 10_000}),
        {"type": "regex", "pattern": "(" * 60 + ")" * 60},
        {"type": "regex"},
        {"type": "json_schema"},
        {"type": "yaml"},
    ],
)
async def test_hostile_and_malformed_forms_are_400_and_never_reach_a_worker(
    platform: Platform, wanted: Any
) -> None:
    response = await platform.chat(response_format=wanted)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("response_format")
    assert platform.worker.requests == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_form_that_does_not_compile_is_400_and_costs_nothing(
    platform: Platform, is_streamed: bool
) -> None:
    before = await platform.balance()
    platform.say("", refusal="The required form is not valid: Unclosed '['")
    response = await platform.chat(
        response_format=strict({"type": "string", "pattern": "[.*"}), stream=is_streamed
    )
    assert response.status_code == 400, "the status waits for the compiler, streamed or not"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_structure", "response_format")
    assert "Unclosed" in error["message"]
    assert await platform.settled() == before


async def test_the_status_waits_although_the_queue_is_long(platform: Platform) -> None:
    platform.say("", refusal="not valid")
    platform.worker.is_taking = False
    asking = asyncio.create_task(
        platform.chat(response_format={"type": "json_object"}, stream=True)
    )
    await asyncio.sleep(0.6)
    platform.worker.is_taking = True
    assert (await asking).status_code == 400


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_forced_calls_are_written_by_grammar_and_read_back(
    platform: Platform, choice: Any, is_streamed: bool
) -> None:
    platform.say(FORCED)
    response = await platform.chat(tools=[TOOL], tool_choice=choice, stream=is_streamed)
    assert response.status_code == 200, response.text
    if is_streamed:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
        calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert not any(delta.get("content") for delta in deltas)
        arguments = "".join(part["function"]["arguments"] for part in calls)
        assert events(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        (found,) = response.json()["choices"]
        assert found["finish_reason"] == "tool_calls"
        arguments = found["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"city": "Bern"}
    structure = platform.worker.requests[-1].structure
    assert structure is not None
    schema = json.loads(structure.source)
    assert schema["minItems"] == 1
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "get_weather"}
    assert schema["$defs"]["tool_0"] == TOOL["function"]["parameters"]


async def test_references_inside_of_a_tool_s_schema_move_with_it(platform: Platform) -> None:
    platform.say(FORCED)
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"type": "string"}},
    }
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    await platform.chat(tools=[tool], tool_choice="required")
    structure = platform.worker.requests[-1].structure
    assert structure is not None
    moved = json.loads(structure.source)["$defs"]["tool_0"]["properties"]["city"]
    assert moved == {"$ref": "#/$defs/tool_0/$defs/City"}


async def test_what_contradicts_a_form_is_400(platform: Platform) -> None:
    form = {"type": "json_object"}
    for more in ({"min_tokens": 5}, {"ignore_eos": True}):
        response = await platform.chat(response_format=form, **more)
        assert response.status_code == 400, more
        assert response.json()["error"]["param"] == next(iter(more))
    both = await platform.chat(response_format=form, tools=[TOOL], tool_choice="required")
    assert both.status_code == 400


class City(BaseModel):
    a: int


async def test_openai_s_parse_returns_the_object(platform: Platform, base_url: str) -> None:
    platform.say('{"a": 7}')
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=platform.customer.key
    ) as client:
        answer = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=City
        )
    assert answer.choices[0].message.parsed == City(a=7)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_the_arguments_of_a_strict_tool_are_bound_though_it_may_be_left_alone(
    platform: Platform, path: str
) -> None:
    platform.say("No tool is needed.")
    parts = {"name": "look", "strict": True}
    function, claude = parts | {"parameters": SCHEMA}, parts | {"input_schema": SCHEMA}
    question = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": question,
            "tools": [{"type": "function", "function": function}],
        },
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function"} | function]},
        "/v1/messages": {"messages": question, "max_tokens": 64, "tools": [claude]},
    }[path]
    answer = await platform.post(path, {"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    structure = platform.worker.requests[-1].structure
    assert structure is not None
    assert structure.kind == "structural_tag"
    tags = json.loads(structure.source)["format"]
    assert not tags["stop_after_first"]
    assert json.dumps(SCHEMA) in structure.source


async def test_a_refusal_names_the_field_that_the_form_comes_from(platform: Platform) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
    for body, param in (
        ({"tools": [tool]}, "tools"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
        ({"response_format": strict(SCHEMA)}, "response_format"),
        ({"response_format": strict(SCHEMA), "tools": [tool]}, "response_format"),
    ):
        platform.say("", refusal="The required form is too complex to compile in time.")
        answer = await platform.chat(**body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, body
