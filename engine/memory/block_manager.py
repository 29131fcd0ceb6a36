"""Who owns which KV block.

Every block is in exactly one of three states: free (content worthless; those from `num_used` on were
never written), cached and unreferenced (content known by hash, may be evicted), or referenced by
`ref_counts[block]` block tables.

The law: a block with more than one reference is never written; the writer gets a copy first.
"""

import numpy as np
from numpy.typing import NDArray

from engine.memory.prefix_cache import PrefixCache


class BlockManager:
    """Reference counts of all blocks; allocates from the free ones, then by eviction."""

    def __init__(self, num_blocks: int, block_size: int, *, is_prefix_cache_on: bool) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_prefix_cache_on = is_prefix_cache_on
        self.prefix_cache = PrefixCache()
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.num_used = 0
        """Blocks from here on were never handed out."""
        self._given_back: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        num_unused = self.num_blocks - self.num_used
        return len(self._given_back) + num_unused + self.prefix_cache.num_unreferenced

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks with one reference each; None (and no change) when too few."""
        if num_blocks > self.num_free:
            return None
        blocks = []
        for _ in range(num_blocks):
            block = self._take()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def _take(self) -> int:
        if self._given_back:
            return self._given_back.pop()
        if self.num_used < self.num_blocks:
            self.num_used += 1
            return self.num_used - 1
        return self.prefix_cache.evict()

    def match(self, block_hashes: list[bytes]) -> list[int]:
        """Blocks that already hold this prefix. Changes nothing."""
        return self.prefix_cache.match(block_hashes) if self.is_prefix_cache_on else []

    def share(self, blocks: list[int]) -> None:
        """One more reference to each block: a prefix hit or a fork."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self.prefix_cache.reference(block)
            self.ref_counts[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Give one reference to each block back.

        The last block goes first, so that eviction takes the tail of a prefix before its head.
        """
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} was freed twice"
            if self.ref_counts[block] > 0:
                continue
            if self.prefix_cache.holds(block):
                self.prefix_cache.unreference(block)
            else:
                self._given_back.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether a writer must copy this block first."""
        return bool(self.ref_counts[block] > 1)

    def name(self, block: int, block_hash: bytes) -> None:
        """Make a full, computed block available to later requests with the same prefix."""
        if self.is_prefix_cache_on and not self.prefix_cache.holds(block):
            self.prefix_cache.insert(block_hash, block)

    def problems(self, block_tables: list[list[int]]) -> list[str]:
        """Count every block from the tables that hold it; empty when all adds up."""
        expected: NDArray[np.int32] = np.zeros(self.num_blocks, dtype=np.int32)
        for table in block_tables:
            if len(set(table)) != len(table):
                return [f"a block table holds a block twice: {table}"]
            np.add.at(expected, table, 1)
        found = [
            f"block {block} has {self.ref_counts[block]} references, {expected[block]} holders"
            for block in np.flatnonzero(expected != self.ref_counts)[:8].tolist()
        ]
        free = {*self._given_back, *range(self.num_used, self.num_blocks)}
        if len(free) != len(self._given_back) + self.num_blocks - self.num_used:
            found.append("the free list holds a block twice")
        idle = {
            block
            for block in np.flatnonzero(self.ref_counts == 0).tolist()
            if not self.prefix_cache.holds(block)
        }
        if free != idle:
            found.append(f"blocks {sorted(free ^ idle)[:8]} are lost or free while in use")
        return found + self.prefix_cache.problems(self.ref_counts)
