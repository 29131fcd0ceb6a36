"""Faults of our own parts at every step of a request: the customer pays nothing and hears of it."""

import asyncio

import pytest

from billing.errors import HoldFenced, LedgerUnavailable
from billing.hold_operations import Hold, SettleHold, Settlement
from billing.holds import HoldWriter
from engine.broker.gateway import GatewayBroker, Submission
from engine.errors import ModelUnavailable
from engine.messages import GenerateRequest
from tests.api.conftest import Platform
from tests.api.test_chat import events
from tests.api.test_validation import assert_envelope


async def test_a_queue_out_of_reach_is_503_and_releases_the_hold(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(self: object, submission: Submission) -> None:
        raise ModelUnavailable("the queue does not answer")

    before = await platform.balance()
    monkeypatch.setattr(GatewayBroker, "submit", unreachable)
    for is_streamed in (False, True):
        response = await platform.chat(stream=is_streamed)
        assert assert_envelope(response, 503)["code"] == "model_unavailable"
        assert response.headers["x-should-retry"] == "true"
    assert await platform.settled() == before
    assert platform.worker.requests == []


async def test_a_ledger_out_of_reach_is_503_and_nothing_is_queued(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: object, admit: object) -> "asyncio.Future[Hold]":
        answer: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()
        answer.set_exception(LedgerUnavailable("The ledger cannot be reached."))
        return answer

    monkeypatch.setattr(HoldWriter, "begin", unreachable)
    response = await platform.chat()
    assert assert_envelope(response, 503)["code"] == "ledger_unavailable"
    assert platform.services.broker.num_streams == 0
    assert platform.worker.requests == []


async def test_a_hold_that_the_sweeper_took_over_ends_the_stream_with_an_error(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fenced(self: object, settle: SettleHold) -> Settlement:
        raise HoldFenced("This hold has moved on.")

    platform.say("too late")
    monkeypatch.setattr(HoldWriter, "settle", fenced)
    assert events(await platform.chat(stream=True))[-1]["error"]["code"] == "internal_error"
    assert_envelope(await platform.chat(), 500)


async def test_a_settlement_that_takes_too_long_goes_on_without_its_reader(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = HoldWriter.settle

    async def slow(self: HoldWriter, settled: SettleHold) -> Settlement:
        await asyncio.sleep(0.5)
        return await settle(self, settled)

    settings = platform.services.settings.model_copy(update={"settle_wait_s": 0.1})
    object.__setattr__(platform.services, "settings", settings)
    before = await platform.balance()
    platform.say("the answer")
    monkeypatch.setattr(HoldWriter, "settle", slow)
    chunks = events(await platform.chat(stream=True))
    assert chunks[-1]["error"]["code"] == "settlement_delayed"
    assert (await platform.settled()).posted < before.posted


async def test_a_bug_while_tokens_flow_voids_the_hold(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: object, frame: object) -> None:
        raise KeyError("a bug")

    before = await platform.balance()
    platform.say("one two three")
    monkeypatch.setattr("api.choices.Choice.accept", explode)
    assert_envelope(await platform.chat(), 500)
    assert await platform.settled() == before


async def test_a_request_that_cannot_be_put_into_words_holds_nothing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, request: GenerateRequest) -> Submission:
        raise RuntimeError("while its hold is being committed")

    before = await platform.balance()
    monkeypatch.setattr(GatewayBroker, "prepare", fail)
    assert_envelope(await platform.chat(), 500)
    assert await platform.settled() == before
