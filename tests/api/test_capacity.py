"""What the workers' memory can never take is refused before it is held or queued."""

import asyncio

from engine.messages import GenerateRequest
from tests.api.conftest import MODEL, Platform
from tests.api.fake_worker import Script
from tests.api.test_validation import assert_envelope

CAPACITY = 512


async def shrunk(platform: Platform) -> None:
    """The worker says that its KV cache is smaller than the model's context."""
    platform.worker.total_kv_tokens = CAPACITY
    async with asyncio.timeout(5):
        while True:
            beats = await platform.services.broker.heartbeats(MODEL)
            if beats and beats[0].total_kv_tokens == CAPACITY:
                return
            await asyncio.sleep(0.05)


async def test_a_prompt_larger_than_the_kv_cache_is_400_and_holds_nothing(
    platform: Platform,
) -> None:
    await shrunk(platform)
    before = await platform.balance()
    error = assert_envelope(await platform.chat("word " * 600), 400)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 448 tokens" in error["message"]
    assert await platform.balance() == before
    assert platform.worker.num_running == 0


async def test_an_output_limit_beyond_the_kv_cache_is_clamped_to_what_it_takes(
    platform: Platform,
) -> None:
    await shrunk(platform)
    seen: list[GenerateRequest] = []

    def script_of(request: GenerateRequest) -> Script:
        seen.append(request)
        return Script(token_ids=platform.ids("fine"))

    platform.worker.script_of = script_of
    response = await platform.chat("Hi", max_tokens=100_000)
    assert response.status_code == 200, response.text
    (request,) = seen
    assert len(request.prompt_token_ids) + request.max_tokens <= CAPACITY - 64
