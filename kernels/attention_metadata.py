"""Where the tokens of one step belong: what attention must know beside q, k and v.

A step is a flat list of tokens. Sequence i owns tokens query_start[i] .. query_start[i + 1] of it,
and they are the *last* tokens of a context of context_lens[i]. So prefill, a chunk of prefill on a
cached prefix, and decode (one token) are one thing, and a mixed batch is one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.attention_workspace import AttentionWorkspace
from kernels.kv_cache import BLOCK_SIZE

# A bucket of decodes is padded to its longest context; shorter ones than this share join another.
MIN_BUCKET_FILL = 0.875
# Gathered keys of one bucket stay near the caches: 8192 tokens of 3 x 64 floats are 6 MB.
MAX_BUCKET_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's sequences. All tensors lie on the device of q.

    query_start: [num_sequences + 1] int32, token offsets; every sequence has at least one token.
    context_lens: [num_sequences] int32, tokens in each context, this step's included.
    block_tables: [num_sequences, max_blocks] int32; entries beyond a context are never read.
    positions: [num_tokens] int64, each token's place in its context.
    slot_mapping: [num_tokens] int64, block * 64 + offset to write k and v to; -1 = do not write.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    block_size: int = BLOCK_SIZE
    shared_workspace: AttentionWorkspace | None = None
    """Of whoever makes many steps, and keeps it as long as graphs that were captured with it."""

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        block_size: int = BLOCK_SIZE,
    ) -> AttentionMetadata:
        """Metadata from lists; a sequence's block table may be longer than its context needs."""
        assert len(query_lens) == len(context_lens) == len(block_tables)
        assert all(0 < n <= c for n, c in zip(query_lens, context_lens, strict=True))
        max_blocks = max((len(table) for table in block_tables), default=0)
        padded = [[*table, *[0] * (max_blocks - len(table))] for table in block_tables]
        starts = [0]
        positions: list[int] = []
        slots: list[int] = []
        for num_queries, length, table in zip(query_lens, context_lens, block_tables, strict=True):
            starts.append(starts[-1] + num_queries)
            own = range(length - num_queries, length)
            positions.extend(own)
            slots.extend(table[p // block_size] * block_size + p % block_size for p in own)
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).view(
                len(block_tables), max_blocks
            ),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
            block_size=block_size,
        )

    @property
    def num_sequences(self) -> int:
        """Sequences in this step."""
        return self.context_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in this step."""
        return self.positions.shape[0]

    @cached_property
    def workspace(self) -> AttentionWorkspace:
        """Scratch memory of the GPU kernels, which the layers of this step share."""
        return self.shared_workspace or AttentionWorkspace(self.positions.device)

    # What follows serves the plain-torch path: computed once a step, used by every layer.

    @cached_property
    def query_starts(self) -> list[int]:
        """`query_start` on the host."""
        return [int(start) for start in self.query_start.tolist()]

    @cached_property
    def context_lengths(self) -> list[int]:
        """`context_lens` on the host."""
        return [int(length) for length in self.context_lens.tolist()]

    @cached_property
    def prefill_sequences(self) -> list[int]:
        """Sequences with more than one token in this step."""
        starts = self.query_starts
        return [i for i in range(self.num_sequences) if starts[i + 1] - starts[i] > 1]

    @cached_property
    def written_tokens(self) -> torch.Tensor | None:
        """Indices of the tokens whose k and v are stored; None = all of them."""
        is_written = self.slot_mapping >= 0
        return None if bool(is_written.all()) else is_written.nonzero().squeeze(1)

    @cached_property
    def decode_buckets(self) -> tuple[DecodeBucket, ...]:
        """The sequences with one token, grouped by like context length, longest first."""
        starts, lengths = self.query_starts, self.context_lengths
        decodes = [i for i in range(self.num_sequences) if starts[i + 1] - starts[i] == 1]
        decodes.sort(key=lambda i: -lengths[i])
        groups: list[list[int]] = []
        for i in decodes:
            if not groups or not _fits(lengths[groups[-1][0]], lengths[i], len(groups[-1])):
                groups.append([])
            groups[-1].append(i)
        return tuple(self._bucket(group) for group in groups)

    def _bucket(self, sequences: list[int]) -> DecodeBucket:
        index = torch.tensor(sequences, device=self.context_lens.device)
        lengths = [self.context_lengths[i] for i in sequences]
        tables, context_lens = self.block_tables[index], self.context_lens[index]
        # Entries beyond a context may be anything; the padded batch reads the first page instead.
        pages = torch.arange(tables.shape[1], device=tables.device)
        is_used = pages * self.block_size < context_lens[:, None]
        return DecodeBucket(
            rows=self.query_start[index].long(),
            context_lens=context_lens,
            block_tables=torch.where(is_used, tables, tables[:, :1]),
            min_context_len=min(lengths),
            max_context_len=max(lengths),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBucket:
    """Decodes whose contexts are about as long, so that they run as one padded batch.

    rows: [B] int64, their tokens in the step; context_lens: [B]; block_tables: [B, max_blocks].
    """

    rows: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    min_context_len: int
    max_context_len: int


def _fits(longest: int, length: int, num_members: int) -> bool:
    if (num_members + 1) * longest > MAX_BUCKET_TOKENS:
        return False
    is_same_page = (length - 1) // BLOCK_SIZE == (longest - 1) // BLOCK_SIZE
    return is_same_page or length >= MIN_BUCKET_FILL * longest
