"""Which beginnings of prompts a tenant has sent lately: an estimate of what a worker has cached.

Only an estimate: workers evict, and other API processes have sent prompts, too. Never used for money.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 64
"""Workers cache whole pages of so many tokens."""
NUM_BLOCKS_MAX = 200_000
"""Of all tenants: about 30 MB."""


class Prefixes:
    """Hash chains over the blocks of prompts, by tenant and model; the oldest are forgotten."""

    def __init__(self, num_blocks_max: int = NUM_BLOCKS_MAX) -> None:
        self._max = num_blocks_max
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def note(self, tenant: str, model: str, token_ids: list[int]) -> None:
        """A prompt was sent to a worker."""
        for digest in _chain(tenant, model, token_ids):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max:
            self._seen.popitem(last=False)

    def num_known(self, tenant: str, model: str, token_ids: list[int]) -> int:
        """Tokens at the beginning of a prompt that were sent before; never all of them."""
        num_blocks = 0
        for digest in _chain(tenant, model, token_ids[:-1]):
            if digest not in self._seen:
                break
            num_blocks += 1
        return num_blocks * BLOCK_TOKENS


def _chain(tenant: str, model: str, token_ids: list[int]) -> Iterator[bytes]:
    digest = blake2b(f"{tenant}\0{model}".encode(), digest_size=16).digest()
    num_whole = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    rows = np.array(token_ids[:num_whole], dtype=np.int32).reshape(-1, BLOCK_TOKENS)
    for row in rows:
        digest = blake2b(row.tobytes(), digest_size=16, key=digest).digest()
        yield digest
