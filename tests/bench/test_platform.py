"""What a benchmark reads of a worker's memory."""

import os

from kernels.cpu.memory import lazy_zeros
from tests.bench.platform import MIB, pool_bytes_in_memory


def test_of_a_pool_only_what_was_written_counts() -> None:
    pool = lazy_zeros(8 << 30)
    pool[: 64 * MIB].fill_(1)
    assert 64 * MIB <= pool_bytes_in_memory(os.getpid(), pool.nbytes) < 70 * MIB
    pool[1 << 30 : (1 << 30) + 32 * MIB].fill_(1)
    assert 96 * MIB <= pool_bytes_in_memory(os.getpid(), pool.nbytes) < 102 * MIB
    assert pool_bytes_in_memory(os.getpid(), 1 << 50) == 0
