"""Who leaves or dies while an answer is paused: the client, the worker, the gateway."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from billing.gateways import GatewayLease
from billing.sweeps import close_all_lost
from tests.api.conftest import BROKER, MODEL, Platform
from tests.api.credit import (
    assert_reconciled,
    give,
    num_paused,
    paused,
    price_of,
    set_slices,
    until,
)
from tests.api.fake_worker import FakeWorker
from tests.api.test_chat import events, joined
from tests.api.test_connections import outcomes, worker_is_idle_within

STORY = (
    "One two three four five six seven eight nine ten eleven twelve thirteen. 🚀 Naïve café, so."
)


@pytest.fixture(autouse=True)
async def credit_for_six_tokens(platform: Platform) -> None:
    set_slices(platform, 4, pause_s=10)
    platform.say(STORY, delay_s=0.001)
    await platform.set_balance(platform.customer, await price_of(platform, 6))


async def test_a_client_that_leaves_while_paused_pays_what_it_got(
    platform: Platform, base_url: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    before = await platform.balance()
    async with (
        httpx.AsyncClient(base_url=base_url) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body, headers=platform.customer.headers
        ) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith(": paused"):
                break
    started = time.monotonic()
    after = await platform.settled()
    assert time.monotonic() - started < 2
    assert await outcomes(platform) == [("aborted", 6)]
    assert before.posted - after.posted == await price_of(platform, 6)
    assert num_paused(platform) == 0
    await worker_is_idle_within(platform, 1)


@pytest.fixture
def successor(platform: Platform, clean_redis: str) -> Iterator[FakeWorker]:
    """Another worker of the same model, which takes nothing yet."""
    worker = FakeWorker(clean_redis, MODEL, BROKER, name="successor", is_taking=False)
    worker.script_of = platform.worker.script_of
    yield worker.start()
    worker.stop()


@pytest.mark.parametrize("is_taken_before_the_top_up", [True, False])
async def test_a_worker_that_dies_while_a_stream_is_paused_is_replaced(
    platform: Platform, successor: FakeWorker, is_taken_before_the_top_up: bool
) -> None:
    asking = asyncio.create_task(platform.chat(stream=True))
    await paused(platform)
    [stream] = platform.services.broker._link(MODEL).streams.values()
    platform.worker.is_dead = True
    await until(lambda: stream.request.attempt == 2, 10)
    if is_taken_before_the_top_up:
        successor.is_taking = True
        await until(lambda: successor.num_running == 1)
        await give(platform, 10**9)
    else:
        await give(platform, 10**9)
        await until(lambda: num_paused(platform) == 0 or stream.request.authorized_tokens > 6)
        successor.is_taking = True
    response = await asking
    assert joined(events(response)) == STORY
    [(outcome, output_tokens)] = await outcomes(platform)
    assert (outcome, output_tokens) == ("completed", len(platform.ids(STORY)) + 1)
    assert [request.attempt for request in successor.requests] == [2]
    await assert_reconciled(platform)


async def test_a_gateway_that_loses_its_lease_while_paused_is_fenced(platform: Platform) -> None:
    """The sweeper frees the hold; whoever held it can neither extend nor settle it."""
    before = await platform.balance()
    asking = asyncio.create_task(platform.chat(stream=True))
    await paused(platform)
    lease = GatewayLease(platform.services.sessions, platform.services.gateway_id)
    await lease.release()
    assert await close_all_lost(platform.services.sessions) == 1
    await lease.renew()
    await give(platform, 10**9)
    chunks = events(await asking)
    assert chunks[-1]["error"]["code"] == "internal_error"
    after = await platform.settled()
    assert after.posted == before.posted + 10**9
    assert num_paused(platform) == 0
    await assert_reconciled(platform)
