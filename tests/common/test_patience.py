"""`Patience` against what `asyncio.timeout` promises."""

import asyncio
import time

import pytest

from common.patience import Patience

SHORT_S, LONG_S = 0.03, 30.0


async def test_what_takes_too_long_raises_a_timeout_and_leaves_no_cancellation_behind() -> None:
    patience = Patience(SHORT_S)
    for _ in range(2):
        with pytest.raises(TimeoutError), patience:
            await asyncio.sleep(LONG_S)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)


async def test_each_wait_has_the_whole_time_whatever_the_one_timer_was_armed_for() -> None:
    patience = Patience(SHORT_S)
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 4 * SHORT_S:
        with patience:
            await asyncio.sleep(SHORT_S / 4)
    waited_s = time.monotonic()
    with pytest.raises(TimeoutError), patience:
        await asyncio.sleep(LONG_S)
    assert time.monotonic() - waited_s >= SHORT_S


async def test_a_cancellation_of_somebody_else_stays_a_cancellation() -> None:
    async def wait() -> None:
        with Patience(LONG_S):
            await asyncio.sleep(LONG_S)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_fires_between_two_waits() -> None:
    with Patience(SHORT_S):
        pass
    await asyncio.sleep(2 * SHORT_S)
