"""A model whose next token is a known function of *all* tokens that its KV pages hold.

It stores token ids in the pages and reads the whole context back through the block tables, so a
wrong block, a lost copy or a stale page changes its output.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from engine.models.model import ModelSpec
from kernels.attention_metadata import AttentionMetadata

BLOCK = 64
VOCAB = 512
NUM_PLANTED = 2
"""The last ids are never generated, so that a test can plant a failure on them."""


class FakePages:
    def __init__(self, num_blocks: int) -> None:
        self.tokens = np.full(num_blocks * BLOCK, -1, dtype=np.int64)

    def copy_block(self, source: int, destination: int) -> None:
        pages = self.tokens.reshape(-1, BLOCK)
        pages[destination] = pages[source]


def next_token(context: list[int], vocab_size: int = VOCAB) -> int:
    digest = hashlib.md5(np.array(context, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % (vocab_size - NUM_PLANTED)


def repeating_token(context: list[int]) -> int:
    """Says again what stood 9 tokens ago; once in ten times something of its own."""
    own = next_token(context)
    return own if own % 10 == 0 else context[-9:][0]


NextToken = Callable[[list[int]], int]


def expected_output(
    prompt: list[int],
    num_tokens: int,
    stop: tuple[int, ...] = (),
    says: NextToken = next_token,
) -> list[int]:
    """What the fake model generates, computed without any cache."""
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(says(prompt + output))
        if output[-1] in stop:
            break
    return output


class FakeModel:
    def __init__(self, context_length: int = 4096, says: NextToken = next_token) -> None:
        self.says = says
        self.spec = ModelSpec(VOCAB, context_length, 1)
        self.device = torch.device("cpu")
        self.fails_on_token: int | None = None
        self.nan_on_token: int | None = None
        self.num_computed_tokens = 0

    def create_kv_cache(self, num_blocks: int) -> FakePages:
        return FakePages(num_blocks)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: FakePages,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        if self.fails_on_token is not None and self.fails_on_token in token_ids.tolist():
            raise RuntimeError("planted failure")
        self.num_computed_tokens += len(token_ids)
        kv_cache.tokens[metadata.slot_mapping.numpy()] = token_ids.numpy()
        logits = torch.zeros(len(rows), self.spec.vocab_size)
        starts = metadata.query_start.numpy()
        for at, row in enumerate(rows.tolist()):
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(metadata.positions[row]) + 1
            behind = int(starts[sequence + 1]) - 1 - row
            assert length + behind == int(metadata.context_lens[sequence])
            positions = np.arange(length)
            blocks = metadata.block_tables[sequence].numpy()[positions // BLOCK]
            context = kv_cache.tokens[blocks * BLOCK + positions % BLOCK].tolist()
            assert -1 not in context, "read a position that was never written"
            if self.nan_on_token is not None and self.nan_on_token in context:
                logits[at] = torch.nan
            else:
                logits[at] = self.logits(context)
        return logits

    def logits(self, context: list[int]) -> torch.Tensor:
        row = torch.zeros(self.spec.vocab_size)
        row[self.says(context)] = 10.0
        return row
