"""The table of compatibility is true, and the behaviours that no other test holds."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.compatibility import BEHAVIOURS, BUGS
from tests.api.conftest import CONTEXT_LENGTH, MODEL, Platform, serving
from tests.api.test_chat import events, joined

ROOT = Path(__file__).parents[2]


def test_every_behaviour_names_tests_that_exist() -> None:
    for behaviour, tests in [*BEHAVIOURS.values(), *BUGS.values()]:
        assert tests, f"nothing holds us to it: {behaviour}"
        for test in tests:
            path, name = test.split("::")
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), test


async def test_a_stream_arrives_in_pieces_and_uncompressed(platform: Platform) -> None:
    platform.say("one two three four five six", delay_s=0.03)
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]}
    headers = platform.customer.headers | {"accept-encoding": "gzip"}
    async with (
        serving(platform.app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        reads = [piece async for piece in response.aiter_raw()]
    assert len(reads) > 3
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers
    assert response.headers["x-accel-buffering"] == "no"


async def test_metrics_are_not_public(platform: Platform) -> None:
    for path in ("/metrics", "/v1/metrics"):
        assert (await platform.client.get(path)).status_code == 404


async def test_the_fingerprint_is_a_string_or_null(platform: Platform) -> None:
    platform.say("fine")
    found = {(await platform.chat()).json()["system_fingerprint"] for _ in range(2)}
    assert len(found) == 1
    assert isinstance(next(iter(found)), str | None)


async def test_without_a_limit_the_context_is_the_limit(platform: Platform) -> None:
    platform.say("x")
    usage = (await platform.chat()).json()["usage"]
    limit = platform.worker.requests[-1].max_tokens
    assert limit == CONTEXT_LENGTH - usage["prompt_tokens"]


@pytest.mark.parametrize(
    "roles",
    [
        ["assistant", "user"],
        ["user", "user"],
        ["user", "assistant", "assistant"],
        ["system"],
        ["tool"],
    ],
)
async def test_odd_orders_of_roles_are_served_or_refused(
    platform: Platform, roles: list[str]
) -> None:
    platform.say("fine")
    messages = [{"role": role, "content": "x", "tool_call_id": "c"} for role in roles]
    body = {"model": MODEL, "messages": messages}
    assert (await platform.post("/v1/chat/completions", body)).status_code in (200, 400)


async def test_the_last_message_is_continued_only_on_request(platform: Platform) -> None:
    platform.say(" world")
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Hello"}]
    body = {"model": MODEL, "messages": messages}
    await platform.post("/v1/chat/completions", body)
    await platform.post("/v1/chat/completions", body | {"continue_final_message": True})
    closed, left_open = (request.prompt_token_ids for request in platform.worker.requests)
    assert tuple(left_open[-1:]) == platform.ids("Hello")[-1:]
    assert closed[: len(left_open)] == left_open
    assert len(closed) > len(left_open)
    wrong = await platform.chat(continue_final_message=True)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("content", ["", " ", []])
async def test_empty_content_is_served(platform: Platform, content: Any) -> None:
    platform.say("fine")
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    assert (await platform.post("/v1/chat/completions", body)).status_code == 200


async def test_every_streamed_choice_has_an_index_and_a_delta(platform: Platform) -> None:
    platform.say("one two")
    for chunk in events(await platform.chat(n=2, stream=True)):
        for choice in chunk["choices"]:
            assert isinstance(choice["index"], int)
            assert isinstance(choice["delta"], dict)
            assert "message" not in choice
            assert "finish_reason" in choice


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_is_refused_is_refused_before_a_stream_begins(
    platform: Platform, is_streamed: bool
) -> None:
    too_long = await platform.chat("word " * 9_000, stream=is_streamed)
    assert too_long.status_code == 400
    unknown = await platform.chat(model="no/such", stream=is_streamed)
    assert unknown.status_code == 404
    await platform.set_balance(platform.customer, 0)
    assert (await platform.chat(stream=is_streamed)).status_code == 402


@pytest.mark.parametrize("stop", [[], "", [""]])
async def test_empty_stops_stop_nothing(platform: Platform, stop: Any) -> None:
    platform.say("one two three")
    choice = (await platform.chat(stop=stop)).json()["choices"][0]
    assert choice["message"]["content"] == "one two three"


@pytest.mark.parametrize("is_streamed", [b"false", b"true"])
async def test_a_lone_surrogate_is_400_streamed_or_not(
    platform: Platform, is_streamed: bytes
) -> None:
    body = b'{"model": "%b", "stream": %b, "messages": [{"role": "user", "content": "\\ud83d"}]}'
    response = await platform.client.post(
        "/v1/chat/completions",
        content=body % (MODEL.encode(), is_streamed),
        headers=platform.customer.headers,
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_after_poison_the_answer_is_the_same(platform: Platform) -> None:
    platform.say("one two three")
    before = (await platform.chat(temperature=0)).json()["choices"]
    poison: list[dict[str, Any]] = [
        {"temperature": 1e9}, {"logit_bias": {"99999999": 1}}, {"seed": 2**64}, {"n": -1},
        {"stop": [None]}, {"messages": [[]]}, {"tools": [{}]}, {"response_format": {"type": 5}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(500)}}]},
    ]  # fmt: skip
    answers = await asyncio.gather(*(platform.chat(**parameters) for parameters in poison))
    assert {answer.status_code for answer in answers} == {400}
    assert (await platform.chat(temperature=0)).json()["choices"] == before
    assert joined(events(await platform.chat(stream=True))) == "one two three"


def nested(levels: int) -> Any:
    return json.loads('{"a": ' * levels + "1" + "}" * levels)
