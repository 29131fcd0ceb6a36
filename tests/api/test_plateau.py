"""What an API process keeps of requests that are over: after a while, nothing more."""

from tests.api.conftest import Platform
from tests.plateau import traced_bytes, tracing

PROMPTS = 60
KEPT_BYTES_MAX = 1_000
"""Of each further request: the timers that bound its answer last a minute beyond it."""


async def ask(platform: Platform, first: int) -> None:
    """Distinct prompts, some streamed, some with two choices."""
    for number in range(first, first + PROMPTS):
        content = f"word{number} " * 40
        answer = await platform.chat(content, stream=number % 2 == 0, n=1 + number % 3 // 2)
        assert answer.status_code == 200
    platform.worker.requests.clear()


async def test_memory_does_not_grow_with_the_requests_that_are_over(platform: Platform) -> None:
    platform.services.prefixes._max = 50  # the one store that grows to a set limit (30 MB)
    platform.say("one two three")
    await ask(platform, 0)
    with tracing():
        await ask(platform, 1_000)
        before = traced_bytes()
        await ask(platform, 2_000)
        kept = (traced_bytes() - before) / PROMPTS
    assert kept < KEPT_BYTES_MAX, f"{kept:.0f} bytes of each request"
