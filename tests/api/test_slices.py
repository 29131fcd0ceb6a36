"""A hold covers a slice of the output; it grows ahead of the tokens, and never lets them pass."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from billing import budgets
from billing.hold_operations import Hold
from billing.holds import HoldWriter
from billing.money import parse_usd
from engine.broker.gateway import GatewayBroker
from engine.errors import ModelUnavailable
from engine.messages import GenerateRequest
from tests.api.conftest import MODEL, Platform
from tests.api.credit import (
    assert_reconciled,
    num_extensions,
    price_of,
    set_slices,
    until,
)
from tests.api.test_chat import events, joined

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def platform(shared_platform: Platform) -> Platform:
    """One API for all: each test sets its credit, and leaves nothing running."""
    return shared_platform


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def credit_without_end(platform: Platform) -> None:
    await platform.set_balance(platform.customer, 100_000_000_000)
    platform.worker.requests.clear()
    platform.worker.extensions.clear()


STORY = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen. "


async def test_an_admission_holds_the_prompt_and_one_slice_of_each_choice(
    platform: Platform,
) -> None:
    set_slices(platform, 8)
    platform.say(end="never")
    asking = asyncio.create_task(platform.chat(n=3, stream=True))
    await until(lambda: platform.worker.num_running == 1)
    [request] = platform.worker.requests
    assert request.authorized_tokens == 8 < request.max_tokens
    assert (await platform.balance()).held == await price_of(platform, 3 * 8)
    asking.cancel()
    await until(lambda: platform.worker.num_running == 0)


async def test_the_fence_moves_ahead_of_the_tokens_and_nobody_notices(platform: Platform) -> None:
    set_slices(platform, 8)
    text = STORY * 4
    num_tokens = len(platform.ids(text)) + 1
    platform.say(text, delay_s=0.005)
    before, num_before = await platform.balance(), num_extensions(platform, "granted")
    response = await platform.chat(stream=True, stream_options={"include_usage": True})
    chunks = events(response)
    assert joined(chunks) == text
    assert ": paused" not in response.text
    fences = [extension.authorized_tokens for extension in platform.worker.extensions]
    assert fences == list(range(16, fences[-1] + 1, 8)), "each is a target, one slice farther"
    assert num_tokens <= fences[-1] <= num_tokens + 12, "at most a slice and a half ahead"
    assert num_extensions(platform, "granted") == num_before + len(fences)
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
    after = await platform.settled()
    assert before.posted - after.posted == parse_usd(chunks[-1]["usage"]["cost"])
    await assert_reconciled(platform)


async def test_a_limit_within_the_first_slice_asks_for_nothing_more(platform: Platform) -> None:
    set_slices(platform, 8)
    platform.say(STORY)
    answer = (await platform.chat(max_tokens=8)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "finish_details" not in answer["choices"][0]
    assert platform.worker.extensions == []


async def test_the_last_slice_ends_at_the_limit(platform: Platform) -> None:
    set_slices(platform, 8)
    platform.say(STORY, delay_s=0.002)
    answer = (await platform.chat(max_tokens=11)).json()
    assert answer["usage"]["completion_tokens"] == 11
    assert [extension.authorized_tokens for extension in platform.worker.extensions] == [11]


async def test_an_ended_choice_needs_no_further_slice(platform: Platform) -> None:
    """What was not used of its slice serves the choice that goes on."""
    set_slices(platform, 16)
    text = STORY * 2
    num_tokens = len(platform.ids(text)) + 1

    platform.say(text, delay_s=0.002, short_choice=3)
    await platform.set_balance(platform.customer, await price_of(platform, num_tokens + 3 + 1))
    answer = (await platform.chat(n=2)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] == num_tokens + 3 + 1
    assert answer["usage"]["balance_remaining"] == "0.000000000"


async def test_a_lost_message_to_the_worker_is_said_again(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = GatewayBroker.extend
    told: list[int] = []

    async def losing(self: GatewayBroker, request: GenerateRequest) -> None:
        told.append(request.authorized_tokens)
        if len(told) == 1:
            raise ModelUnavailable("the queue does not answer")
        await extend(self, request)

    monkeypatch.setattr(GatewayBroker, "extend", losing)
    set_slices(platform, 8)
    platform.say(STORY, delay_s=0.002)
    response = await platform.chat(stream=True)
    assert joined(events(response)) == STORY
    assert told[:2] == [16, 16]
    assert ": paused" not in response.text


async def test_a_budget_is_as_exact_as_the_balance_for_slices(platform: Platform) -> None:
    set_slices(platform, 4)
    platform.say(STORY, delay_s=0.001)
    limit = await price_of(platform, 10)
    customer = await platform.issue(platform.customer)
    async with platform.services.sessions.begin() as session:
        await budgets.set_budget(
            session,
            customer.organization_id,
            api_key_id=customer.key_id,
            limit_nano_usd=limit,
            period="total",
        )
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    answer = (await platform.post("/v1/chat/completions", body, customer=customer)).json()
    assert answer["usage"]["completion_tokens"] == 10
    assert parse_usd(answer["usage"]["cost"]) == limit
    assert answer["choices"][0]["finish_details"]["code"] == "budget_exceeded"


async def test_an_extension_that_outlives_its_request_changes_nothing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed, but its answer comes when the request is settled already."""
    extend = HoldWriter.extend

    async def slow(self: HoldWriter, *target: Any, **more: Any) -> Hold:
        hold = await extend(self, *target, **more)
        await asyncio.sleep(1)
        return hold

    monkeypatch.setattr(HoldWriter, "extend", slow)
    set_slices(platform, 40)
    platform.say(STORY, delay_s=0.001)
    answer = (await platform.chat()).json()
    after = await platform.settled()
    assert after.posted == 100_000_000_000 - parse_usd(answer["usage"]["cost"])
    await asyncio.sleep(0.05)
    assert (await platform.balance()).held == 0
    await assert_reconciled(platform)


async def test_what_another_request_frees_serves_the_one_that_waits(platform: Platform) -> None:
    set_slices(platform, 32, pause_s=10)
    num_before = num_extensions(platform, "refused")
    await platform.set_balance(platform.customer, 2 * await price_of(platform, 32))
    platform.say("short", first_delay_s=0.5)
    holding = asyncio.create_task(platform.chat())
    await until(lambda: platform.worker.num_running == 1)
    platform.say(STORY * 3, delay_s=0.001)
    answer = (await platform.chat()).json()
    assert num_extensions(platform, "refused") > num_before
    assert answer["choices"][0]["finish_reason"] == "stop", "the other one used 2 tokens of its 32"
    assert (await holding).status_code == 200
