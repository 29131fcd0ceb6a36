"""Memory that is brought in ahead is that of unused blocks, and nothing else is written."""

from pathlib import Path

import pytest
import torch

from engine.memory.pool_warmer import PoolWarmer
from kernels.cpu.memory import HUGE_PAGE
from kernels.kv_cache import PagedKVCache

NUM_LAYERS, NUM_BLOCKS = 2, 1000
PIECES = 2 * NUM_LAYERS
"""Keys and values of each layer."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(NUM_LAYERS, NUM_BLOCKS, 2, 64, torch.bfloat16, "cpu")


def window(cache: PagedKVCache) -> int:
    return HUGE_PAGE // cache.keys[0][0].nbytes


def work_until_done(warmer: PoolWarmer, num_used: int) -> int:
    num_pieces = 0
    while warmer.work(num_used):
        num_pieces += 1
        assert num_pieces <= NUM_BLOCKS * PIECES
    return num_pieces


def test_so_many_blocks_ahead_are_in_memory_and_then_there_is_nothing_to_do(
    cache: PagedKVCache,
) -> None:
    size = window(cache)
    warmer = PoolWarmer(cache, num_ahead=2 * size)
    before = resident_bytes()
    assert work_until_done(warmer, 0) == 2 * PIECES
    assert resident_bytes() - before >= 2 * PIECES * HUGE_PAGE
    assert not warmer.work(0)
    assert work_until_done(warmer, 1) == PIECES, "one more is used: one more window"


def test_blocks_that_are_used_keep_what_they_hold(cache: PagedKVCache) -> None:
    warmer = PoolWarmer(cache, num_ahead=window(cache))
    assert warmer.work(0)
    for pages in (*cache.keys, *cache.values):  # a step comes between two pieces
        pages[:10] = 1
    work_until_done(warmer, 10)
    for pages in (*cache.keys, *cache.values):
        assert bool((pages[:10] == 1).all())
        assert not pages[10:].any()


def test_what_was_used_since_is_skipped(cache: PagedKVCache) -> None:
    size = window(cache)
    warmer = PoolWarmer(cache, num_ahead=size)
    work_until_done(warmer, 0)
    assert work_until_done(warmer, 5 * size) == PIECES


def test_the_end_of_the_pool_is_the_end(cache: PagedKVCache) -> None:
    warmer = PoolWarmer(cache, num_ahead=10 * NUM_BLOCKS)
    work_until_done(warmer, 0)
    assert not warmer.work(NUM_BLOCKS)
