"""Memory for what lives long and is read every step: zeroed lazily, on huge pages where there are any.

A page fault costs 20 us on some virtual machines, and torch.zeros writes every byte it hands out:
a KV cache of 6 GB took 10 s to make. Here the kernel's own zero pages serve until they are written.
"""

from __future__ import annotations

import mmap
import threading

import torch

HUGE_PAGE = 2 * 1024 * 1024


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """`num_bytes` of zeros as uint8, aligned to a huge page; costs nothing until it is written."""
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    # NOTE: Python's default is a mapping that a forked child shares, and those get no huge pages.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + num_bytes]


class Arena:
    """Cuts pieces out of large mappings: a weight of its own would waste half a huge page.

    A mapping lives as long as any piece of it.
    """

    CHUNK = 64 << 20
    LINE = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = lazy_zeros(0)

    def take(self, num_bytes: int) -> torch.Tensor:
        """`num_bytes` of zeros as uint8, aligned to a cache line."""
        size = -(-num_bytes // self.LINE) * self.LINE
        with self._lock:
            if size > len(self._rest):
                self._rest = lazy_zeros(max(size, self.CHUNK))
            piece, self._rest = self._rest[:num_bytes], self._rest[size:]
        return piece

    def close(self) -> None:
        """The owner of what was taken has all it needs: the next one begins a mapping of its own,
        so that either can leave by itself."""
        with self._lock:
            self._rest = lazy_zeros(0)
