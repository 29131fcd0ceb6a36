"""An answer without credit pauses instead of being cut: it says so, waits, goes on or ends cleanly."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import pytest_asyncio

from accounts import api_keys
from billing import budgets
from billing.errors import LedgerUnavailable
from billing.hold_operations import Hold
from billing.holds import HoldWriter
from billing.money import cost, parse_usd
from tests.api.conftest import MODEL, Platform
from tests.api.credit import (
    assert_reconciled,
    during_a_pause,
    give,
    num_paused,
    paused,
    price_of,
    set_slices,
    until,
)
from tests.api.test_chat import events, joined
from tests.api.test_connections import outcomes, worker_is_idle_within
from tests.api.test_messages import named_events
from tests.api.test_responses import typed_events

STORY = (
    "One two three four five six seven eight nine ten eleven twelve thirteen. 🚀 Naïve café, so."
)
FINISHES = {
    "/v1/chat/completions": "length",
    "/v1/completions": "length",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
PATHS = tuple(FINISHES)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def platform(shared_platform: Platform) -> Platform:
    """One API for all: each test sets its credit, and leaves nothing running."""
    return shared_platform


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def credit_for_six_tokens(platform: Platform) -> None:
    set_slices(platform, 4, pause_s=10)
    platform.say(STORY, delay_s=0.001)
    await platform.set_balance(platform.customer, await price_of(platform, 6))


async def ask(platform: Platform, path: str, **parameters: Any) -> httpx.Response:
    """The same by each protocol, with credit for six tokens."""
    messages = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": [5] * 9, "max_tokens": 500},
        "/v1/messages": {"messages": messages, "max_tokens": 500},
        "/v1/responses": {"input": "Hi"},
    }[path]
    quote = (await platform.post("/v1/quote", body | {"model": MODEL})).json()
    price = (await platform.services.catalogue.find(MODEL)).price
    due = cost(price, uncached_input=quote["prompt_tokens"], cached_input=0, output=6)
    await platform.set_balance(platform.customer, due)
    return await platform.post(path, body | {"model": MODEL} | parameters)


def text_of(path: str, response: httpx.Response) -> str:
    if path == "/v1/messages":
        found = [data for name, data in named_events(response) if name == "content_block_delta"]
        return "".join(data["delta"]["text"] for data in found)
    if path == "/v1/responses":
        found = typed_events(response)
        return "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    if path == "/v1/completions":
        return "".join(part["text"] for chunk in events(response) for part in chunk["choices"])
    return joined(events(response))


def paused_events(response: httpx.Response) -> list[Any]:
    """The `paused` objects of the data events, wherever the protocol has room for them."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [
        event.get("paused") or event["response"]["paused"]
        for event in found
        if "paused" in event or "paused" in (event.get("response") or {})
    ]


async def test_a_stream_says_that_it_is_paused_and_goes_on_after_a_top_up(
    platform: Platform,
) -> None:
    for path in PATHS:
        response = await during_a_pause(
            platform, ask(platform, path, stream=True), lambda: give(platform, 10**9)
        )
        assert response.status_code == 200
        assert text_of(path, response) == STORY
        comments = [line for line in response.text.splitlines() if line.startswith(": paused")]
        assert comments[0].startswith(": paused code=insufficient_credit ends_in_s=")
        [told] = paused_events(response)
        assert (told["code"], told["ends_in_s"]) == ("insufficient_credit", 10)
        assert (await outcomes(platform))[0] == ("completed", len(platform.ids(STORY)) + 1)
        assert num_paused(platform) == 0
        assert (await platform.settled()).posted > 0
    await assert_reconciled(platform)


async def test_without_more_credit_a_stream_ends_cleanly_and_says_why(platform: Platform) -> None:
    set_slices(platform, 4, pause_s=0.2)
    for path in PATHS:
        response = await ask(platform, path, stream=True)
        assert STORY.startswith(text_of(path, response))
        assert (await outcomes(platform))[0][0] == "length"
        finish, code = end_of_stream(path, response)
        assert finish == FINISHES[path]
        assert code == "insufficient_credit"
        assert (await platform.settled()).posted == 0, "all tokens that were paid for, no other"
        await worker_is_idle_within(platform, 1)


def end_of_stream(path: str, response: httpx.Response) -> tuple[str, str]:
    """The finish reason, and the code beside it."""
    if path == "/v1/messages":
        [end] = [data for name, data in named_events(response) if name == "message_delta"]
        return end["delta"]["stop_reason"], end["delta"]["stop_details"]["type"]
    if path == "/v1/responses":
        last = typed_events(response)[-1]
        assert last["type"] == "response.incomplete"
        details = last["response"]["incomplete_details"]
        return details["reason"], details["code"]
    parts = [part for chunk in events(response) for part in chunk["choices"]]
    [end] = [part for part in parts if part["finish_reason"] is not None]
    return end["finish_reason"], end["finish_details"]["code"]


async def test_a_whole_answer_waits_and_then_says_that_it_was_cut(platform: Platform) -> None:
    set_slices(platform, 4, pause_s=0.2)
    for path in PATHS:
        answer = (await ask(platform, path)).json()
        if path == "/v1/messages":
            finish, code = answer["stop_reason"], answer["stop_details"]["type"]
        elif path == "/v1/responses":
            details = answer["incomplete_details"]
            finish, code = details["reason"], details["code"]
        else:
            [choice] = answer["choices"]
            finish, code = choice["finish_reason"], choice["finish_details"]["code"]
        assert (finish, code) == (FINISHES[path], "insufficient_credit")
        assert answer["usage"]["balance_remaining"] == "0.000000000"


async def test_a_whole_answer_is_complete_when_credit_comes_in_time(platform: Platform) -> None:
    response = await during_a_pause(platform, platform.chat(), lambda: give(platform, 10**9))
    assert response.json()["choices"][0]["message"]["content"] == STORY


async def test_a_pause_may_come_again_and_is_told_again(platform: Platform) -> None:
    asking = asyncio.create_task(platform.chat(stream=True))
    await paused(platform)
    platform.worker.num_emitted = 0
    worth = await price_of(platform, 16) - await price_of(platform, 0)
    await give(platform, worth)
    await until(lambda: platform.worker.num_emitted == 16)
    await paused(platform)
    await give(platform, 10**9)
    response = await asking
    assert joined(events(response)) == STORY
    assert len(paused_events(response)) == 2


async def test_all_choices_pause_and_go_on(platform: Platform) -> None:
    await platform.set_balance(platform.customer, await price_of(platform, 13))
    response = await during_a_pause(
        platform, platform.chat(stream=True, n=2), lambda: give(platform, 10**9)
    )
    chunks = events(response)
    assert [joined(chunks, choice) for choice in (0, 1)] == [STORY, STORY]
    assert len(paused_events(response)) == 1


async def test_a_key_that_is_revoked_meanwhile_ends_its_answers_at_the_fence(
    platform: Platform,
) -> None:
    await give(platform, 10**9)
    platform.say(STORY, delay_s=0.03)
    customer = await platform.issue(platform.customer)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    platform.worker.num_emitted = 0
    asking = asyncio.create_task(platform.post("/v1/chat/completions", body, customer=customer))
    await until(lambda: platform.worker.num_emitted > 0)
    async with platform.services.sessions.begin() as session:
        await api_keys.revoke(session, customer.organization_id, customer.key_id)
    answer = (await asking).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["finish_details"]["code"] == "api_key_revoked"
    assert answer["usage"]["completion_tokens"] <= 8


async def test_a_budget_that_is_raised_lets_the_answer_go_on(platform: Platform) -> None:
    await give(platform, 10**9)

    async def bound(limit: int) -> int:
        async with platform.services.sessions.begin() as session:
            await budgets.set_budget(
                session,
                platform.customer.organization_id,
                api_key_id=platform.customer.key_id,
                limit_nano_usd=limit,
                period="total",
            )
            spent = (await budgets.list_budgets(session, platform.customer.organization_id))[0]
        return spent[1].spent_nano_usd

    spent = await bound(10**9)
    await bound(spent + await price_of(platform, 6))
    response = await during_a_pause(platform, platform.chat(stream=True), lambda: bound(10**12))
    assert joined(events(response)) == STORY
    assert [told["code"] for told in paused_events(response)] == ["budget_exceeded"]


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_ledger_out_of_reach_pauses_and_in_the_end_costs_nothing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    await give(platform, 10**9)
    set_slices(platform, 4, pause_s=10 if comes_back else 0.3)
    before = await platform.balance()
    extend, is_away = HoldWriter.extend, True

    async def away(self: HoldWriter, *target: Any, **more: Any) -> Hold:
        if is_away:
            raise LedgerUnavailable("The ledger cannot be reached.")
        return await extend(self, *target, **more)

    monkeypatch.setattr(HoldWriter, "extend", away)
    asking = asyncio.create_task(platform.chat())
    await paused(platform)
    is_away = not comes_back
    answer = await asking
    if comes_back:
        assert answer.json()["choices"][0]["message"]["content"] == STORY
        return
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ledger_unavailable"
    assert await platform.settled() == before


async def test_prompts_of_one_completion_pause_each_for_itself(platform: Platform) -> None:
    body = {"model": MODEL, "prompt": [[5] * 9, [6] * 9], "max_tokens": 100, "stream": True}
    asking = asyncio.create_task(platform.post("/v1/completions", body))
    await paused(platform, 2)
    await give(platform, 10**9)
    response = await asking
    chunks = events(response)
    for index in (0, 1):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == STORY
    assert len(paused_events(response)) == 2


async def test_a_paused_answer_pays_only_for_what_was_accepted(platform: Platform) -> None:
    before = await platform.balance()
    set_slices(platform, 4, pause_s=0.2)
    answer = (await platform.chat(stop="four")).json()
    after = await platform.settled()
    assert before.posted - after.posted == parse_usd(answer["usage"]["cost"])
