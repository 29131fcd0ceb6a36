"""What rank 0 tells the others before each thing that they do together.

A header says what it is and how large; a step's arrays follow as one tensor, from device to device.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.parallel.group import RankGroup
from kernels.attention_metadata import AttentionMetadata


class Order(IntEnum):
    """The first number of a header."""

    CREATE_CACHE = 1
    COPY_BLOCK = 2
    FORWARD = 3


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of one forward pass, but for the cache."""

    token_ids: torch.Tensor
    metadata: AttentionMetadata
    rows: torch.Tensor


def send_step(group: RankGroup, step: Step) -> None:
    """Rank 0: let all others compute this step with it."""
    metadata = step.metadata
    sizes = [len(step.token_ids), metadata.num_sequences, metadata.block_tables.shape[1]]
    most = [metadata.max_query_len, metadata.max_context_len]
    group.send_header([Order.FORWARD, *sizes, len(step.rows), *most])
    parts = (
        step.token_ids,
        metadata.positions,
        metadata.slot_mapping,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables.reshape(-1),
        step.rows,
    )
    group.broadcast(torch.cat([part.to(torch.int64) for part in parts]))


def receive_step(group: RankGroup, header: list[int]) -> Step:
    """Another rank: the step that a header has announced."""
    num_tokens, num_sequences, width, num_rows, max_query_len, max_context_len = header[1:7]
    lens = [num_tokens] * 3 + [num_sequences + 1, num_sequences, num_sequences * width, num_rows]
    packed = torch.empty(sum(lens), dtype=torch.int64, device=group.device)
    parts = group.broadcast(packed).split_with_sizes(lens)
    token_ids, positions, slots, starts, contexts, tables, rows = parts
    metadata = AttentionMetadata(
        query_start=starts.to(torch.int32),
        context_lens=contexts.to(torch.int32),
        block_tables=tables.to(torch.int32).view(num_sequences, width),
        positions=positions,
        slot_mapping=slots,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
    return Step(token_ids, metadata, rows)
