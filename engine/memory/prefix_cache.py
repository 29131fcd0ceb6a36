"""Which KV block already holds which tokens.

A full block is known by the hash of its tokens *and* of everything before them (a hash chain), so
that equal hashes mean equal prefixes. The chain starts from the tenant: one tenant can neither
reuse nor time another tenant's prompts. It also starts from the adapter, which changes every KV.

The law: a block is in the LRU exactly when it is cached and nobody references it. Only such a
block may be evicted.
"""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16
"""128 bits: a collision would show one prompt's KV to another prompt of the same tenant."""


def root_hash(tenant: str, adapter: int = 0) -> bytes:
    """Where the hash chain of one tenant starts, with one adapter of the model or (0) with none."""
    salt = adapter.to_bytes(8, "little")
    return blake2b(
        tenant.encode(), digest_size=HASH_BYTES, person=b"nc-prefix-root", salt=salt
    ).digest()


def extend_hash(parent: bytes, block_token_ids: NDArray[np.int32]) -> bytes:
    """The hash of a full block: its parent's hash, then its token ids."""
    return blake2b(block_token_ids.tobytes(), digest_size=HASH_BYTES, key=parent).digest()


class PrefixCache:
    """Cached blocks by hash, and the unreferenced ones in least-recently-used order."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()

    @property
    def num_unreferenced(self) -> int:
        """Blocks that may be evicted."""
        return len(self._unreferenced)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content and history, or None."""
        return self._block_by_hash.get(block_hash)

    def holds(self, block: int) -> bool:
        """Whether this block's content is known by hash."""
        return block in self._hash_by_block

    def match(self, block_hashes: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `block_hashes`."""
        blocks = []
        for block_hash in block_hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Name a referenced block's content. False when another block is already known by it."""
        if block_hash in self._block_by_hash:
            return False
        assert block not in self._hash_by_block, f"block {block} already has a name"
        self._block_by_hash[block_hash] = block
        self._hash_by_block[block] = block_hash
        return True

    def reference(self, block: int) -> None:
        """The first reference to a cached block: it may no longer be evicted."""
        del self._unreferenced[block]

    def unreference(self, block: int) -> None:
        """The last reference to a cached block is gone: most recently used of the evictable."""
        self._unreferenced[block] = None

    def evict(self) -> int:
        """Forget the least recently used unreferenced block and return it for reuse."""
        block, _ = self._unreferenced.popitem(last=False)
        del self._block_by_hash[self._hash_by_block.pop(block)]
        return block

    def problems(self, ref_counts: NDArray[np.int32]) -> list[str]:
        """Every way in which the bookkeeping contradicts itself; empty when sound."""
        found = []
        if {block: name for name, block in self._block_by_hash.items()} != self._hash_by_block:
            found.append("the two directions of the prefix cache disagree")
        evictable = {block for block in self._hash_by_block if ref_counts[block] == 0}
        if evictable != set(self._unreferenced):
            wrong = sorted(evictable ^ set(self._unreferenced))
            found.append(f"cached blocks {wrong[:8]} are in the wrong state of the LRU")
        return found
