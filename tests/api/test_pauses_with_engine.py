"""Pause and resume over real sockets with the real engine: one slot, which a paused answer gives up.

The model's next token is a function of every token that its KV pages hold: had the pause lost one, or
kept a wrong page, the text would be another one.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import torch

from tests.api.conftest import MODEL, Customer, Platform
from tests.api.credit import assert_reconciled, give, num_paused, price_of, set_slices, until
from tests.api.engine_worker import VOCAB_SIZE, EngineWorker
from tests.engine.fake_model import FakeModel

pytestmark = pytest.mark.slow

NUM_BLOCKS = 8
NUM_TOKENS = 120
AFFORDED = 70
"""More than a block of the KV cache, and no multiple of one."""


class SlowModel(FakeModel):
    """It reads the default model's tokens; a step takes a few milliseconds, as it would."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, vocab_size=VOCAB_SIZE)

    def forward(self, *arguments: Any) -> torch.Tensor:
        time.sleep(0.002)
        return super().forward(*arguments)


@pytest.fixture
def engine_worker(platform: Platform, clean_redis: str) -> Iterator[EngineWorker]:
    platform.worker.is_taking = False
    set_slices(platform, 32, pause_s=20)
    worker = EngineWorker(clean_redis, SlowModel(), NUM_BLOCKS, max_running=1)
    yield worker
    worker.stop()


@dataclass
class Heard:
    """What a client has heard so far."""

    text: str = ""
    num_pauses: int = 0
    choice: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


async def listen(base_url: str, customer: Customer, heard: Heard) -> Heard:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=30) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body, headers=customer.headers
        ) as response,
    ):
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            heard.num_pauses += "paused" in chunk
            heard.usage = chunk.get("usage") or heard.usage
            for choice in chunk["choices"]:
                heard.text += choice["delta"].get("content") or ""
                heard.choice = choice
    return heard


async def test_a_paused_answer_gives_up_its_slot_and_goes_on_token_for_token(
    platform: Platform, base_url: str, engine_worker: EngineWorker
) -> None:
    await platform.set_balance(platform.customer, await price_of(platform, AFFORDED))
    heard = Heard()
    listening = asyncio.create_task(listen(base_url, platform.customer, heard))
    await until(lambda: heard.num_pauses == 1, 15)
    await until(lambda: engine_worker.mailbox.stats.num_parked == 1)
    stats = engine_worker.mailbox.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.free_kv_tokens == stats.total_kv_tokens, "its KV may be evicted"

    # Somebody else gets the only slot meanwhile, and most of the memory.
    rich = await platform.sign_up("rich@example.com")
    whole = await listen(base_url, rich, Heard())
    assert whole.usage["completion_tokens"] == NUM_TOKENS
    assert whole.num_pauses == 0

    assert not listening.done()
    await give(platform, 10**9)
    resumed = await listening
    assert resumed.text == whole.text
    assert resumed.num_pauses == 1
    assert resumed.choice["finish_reason"] == "length"
    assert "finish_details" not in resumed.choice, "it came to its own limit"
    due = await price_of(platform, AFFORDED) + 10**9 - await price_of(platform, NUM_TOKENS)
    assert (await platform.settled()).posted == due
    await assert_reconciled(platform)


async def test_a_pause_that_lasts_too_long_leaves_nothing_in_the_engine(
    platform: Platform, base_url: str, engine_worker: EngineWorker
) -> None:
    set_slices(platform, 32, pause_s=0.5)
    await platform.set_balance(platform.customer, await price_of(platform, AFFORDED))
    heard = await listen(base_url, platform.customer, Heard())
    assert heard.choice["finish_reason"] == "length"
    assert heard.choice["finish_details"]["code"] == "insufficient_credit"
    assert heard.usage["completion_tokens"] == AFFORDED
    assert (await platform.settled()).posted == 0
    assert num_paused(platform) == 0
    await until(lambda: engine_worker.mailbox.stats.num_parked == 0)
    assert not engine_worker.engine.has_work
    await assert_reconciled(platform)
