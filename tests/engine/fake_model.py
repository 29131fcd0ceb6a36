"""A model whose next token is a known function of *all* tokens that its KV pages hold.

It stores token ids in the pages and reads the whole context back through the block tables, so a
wrong block, a lost copy or a stale page changes its output.
"""

import hashlib

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


def expected_output(prompt: list[int], num_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    """What the fake model generates, computed without any cache."""
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(next_token(prompt + output))
        if output[-1] in stop:
            break
    return output


class FakeModel:
    def __init__(self, context_length: int = 4096) -> None:
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
        logits = torch.zeros(len(rows), VOCAB)
        starts = metadata.query_start.numpy()
        for at, row in enumerate(rows.tolist()):
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(metadata.positions[row]) + 1
            assert row == starts[sequence + 1] - 1
            assert length == int(metadata.context_lens[sequence])
            positions = np.arange(length)
            blocks = metadata.block_tables[sequence].numpy()[positions // BLOCK]
            context = kv_cache.tokens[blocks * BLOCK + positions % BLOCK].tolist()
            assert -1 not in context, "read a position that was never written"
            if self.nan_on_token is not None and self.nan_on_token in context:
                logits[at] = torch.nan
            else:
                logits[at, next_token(context)] = 10.0
        return logits
