"""A stream whose worker dies goes on from another one, and the customer pays for it once."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from billing.money import cost, parse_usd
from engine.messages import GenerateRequest
from tests.api.conftest import BROKER, MODEL, Platform
from tests.api.fake_worker import FakeWorker, Script
from tests.api.test_chat import events, joined

TEXT = "One two three four five six seven eight nine ten. 🚀 Naïve café, and so on."


@pytest.fixture
def second_worker(platform: Platform, clean_redis: str) -> Iterator[FakeWorker]:
    """Another worker of the same model, which takes nothing yet."""
    worker = FakeWorker(clean_redis, MODEL, BROKER, name="second-worker", is_taking=False)
    yield worker.start()
    worker.stop()


def say(platform: Platform, worker: FakeWorker, **script: Any) -> None:
    """Both workers run the same model, so they say the same."""
    platform.say(TEXT, **script)
    worker.script_of = platform.worker.script_of


async def kill_in_the_middle(platform: Platform, successor: FakeWorker, num_tokens: int) -> None:
    async with asyncio.timeout(5):
        while platform.worker.num_emitted < num_tokens:
            await asyncio.sleep(0.002)
    platform.worker.is_dead = True
    [stream] = platform.services.broker._link(MODEL).streams.values()
    async with asyncio.timeout(10):
        while stream.is_running:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    successor.is_taking = True


async def generation(platform: Platform, request_id: str) -> dict[str, Any]:
    answer = await platform.client.get(
        f"/v1/generations/{request_id}", headers=platform.customer.headers
    )
    found: dict[str, Any] = answer.json()
    return found


async def test_a_stream_goes_on_from_another_worker_and_is_billed_once(
    platform: Platform, second_worker: FakeWorker
) -> None:
    before = await platform.balance()
    say(platform, second_worker, delay_s=0.02, num_cached_tokens=1)
    stream = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True}
    streaming = asyncio.create_task(platform.chat(**stream))
    await kill_in_the_middle(platform, second_worker, 12)
    response = await streaming
    chunks = events(response)
    num_tokens = len(platform.ids(TEXT))
    for choice in (0, 1):
        assert joined(chunks, choice) == TEXT
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
        logprobs = [one for part in parts for one in (part["logprobs"] or {}).get("content", [])]
        assert len(logprobs) == num_tokens, "every token has its logprob once"
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 2 * (num_tokens + 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}

    [resumed] = second_worker.requests
    assert resumed.attempt == 2
    assert all(0 < len(emitted) < num_tokens for emitted in resumed.emitted_token_ids)
    assert ": queued position=" in response.text.partition('"content":"One')[2], (
        "the wait in the middle is told"
    )
    price = (await platform.services.catalogue.find(MODEL)).price
    due = cost(
        price,
        uncached_input=usage["prompt_tokens"] - 1,
        cached_input=1,
        output=usage["completion_tokens"],
    )
    after = await platform.settled()
    assert before.posted - after.posted == parse_usd(usage["cost"]) == due
    found = await generation(platform, chunks[0]["id"])
    assert (found["worker"], found["attempts"]) == ("second-worker", 2)
    assert found["timing"]["queued_ms"] == 1.0, "as the first worker told it"
    assert found["timing"]["decode_tokens_per_s"] < 50, "the pause counts"


async def test_a_stop_string_is_found_across_the_seam(
    platform: Platform, second_worker: FakeWorker
) -> None:
    say(platform, second_worker, delay_s=0.02)
    answering = asyncio.create_task(platform.chat(stop="four five six seven eight"))
    await kill_in_the_middle(platform, second_worker, len(platform.ids("One two three four five")))
    answer = (await answering).json()
    assert answer["choices"][0]["message"]["content"] == "One two three "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(second_worker.requests) == 1


async def test_a_choice_that_its_text_has_ended_is_not_begun_again(
    platform: Platform, second_worker: FakeWorker
) -> None:
    say(platform, second_worker, delay_s=0.02, choice_delay_s=0.3)
    answering = asyncio.create_task(platform.chat(n=2, stop=" five"))
    async with asyncio.timeout(5):
        while not platform.worker.ended_choices:
            await asyncio.sleep(0.002)
    await kill_in_the_middle(platform, second_worker, len(platform.ids("One two three four five")))
    answer = (await answering).json()
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"One two three four"}
    [resumed] = second_worker.requests
    assert (resumed.attempt, resumed.ended_choices) == (2, (0,))
    assert answer["usage"]["completion_tokens"] == 2 * len(platform.ids("One two three four five"))


async def test_tokens_that_were_lost_on_their_way_are_had_again(platform: Platform) -> None:
    def script_of(request: GenerateRequest) -> Script:
        is_first = request.attempt == 1
        return Script(platform.ids(TEXT), delay_s=0.001, lost_token=3 if is_first else None)

    platform.worker.script_of = script_of
    chunks = events(await platform.chat(stream=True))
    assert joined(chunks) == TEXT
    assert (await generation(platform, chunks[0]["id"]))["attempts"] == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_loses_every_attempt_ends_with_an_error_and_is_free(
    platform: Platform, stream: bool
) -> None:
    before = await platform.balance()
    platform.say(TEXT, delay_s=0.001, lost_token=2)
    response = await platform.chat(stream=stream)
    error = error_of(response, is_streamed=stream)
    assert error["code"] == "request_lost"
    assert "Nothing was charged" in error["message"]
    assert [request.attempt for request in platform.worker.requests] == [1, 2, 3]
    assert await platform.settled() == before
    assert platform.services.broker.num_streams == 0


def error_of(response: httpx.Response, *, is_streamed: bool) -> dict[str, Any]:
    if not is_streamed:
        assert response.status_code == 503
        error: dict[str, Any] = response.json()["error"]
        return error
    blocks = [block for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "data: [DONE]"
    found: dict[str, Any] = json.loads(blocks[-2].removeprefix("data: "))["error"]
    return found
