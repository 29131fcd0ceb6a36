"""What one step computes, as flat numpy arrays: prefill chunks first, then decodes and their drafts.

Every array is built once per step; nothing here runs per decoding sequence in Python.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.slots import SlotTable
from engine.sequence import Sequence

NO_ROWS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
NO_TOKENS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` tokens of a sequence; the last ones of its prompt if `is_last`."""

    sequence: Sequence
    num_tokens: int
    is_last: bool
    sample_slots: list[int]
    """The slots of all its choices when the chunk is the last one, else empty."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens that follow each other, whose logprobs a chunk gives."""

    sequence: Sequence
    positions: range


class AdjustedRow(NamedTuple):
    """A sample row whose logits change before a token is chosen."""

    row: int
    sequence: Sequence
    drafts: NDArray[np.int32]
    """Tokens that count as said already where this row's one is chosen."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that decodes compute as if they were said, after the one that they have."""

    num_tokens: NDArray[np.int64]
    """[num_decodes]"""
    token_ids: NDArray[np.int32]
    """[num_tokens.sum()]: those of the first decode, then those of the next."""

    @classmethod
    def of(cls, drafts: list[NDArray[np.int32]]) -> "Drafts":
        """Those of each decode."""
        num_tokens = np.array([len(some) for some in drafts], dtype=np.int64)
        return cls(num_tokens, np.concatenate([NO_TOKENS, *drafts]))

    @classmethod
    def none(cls, num_decodes: int) -> "Drafts":
        """Each decode computes its last token alone."""
        return cls(np.zeros(num_decodes, dtype=np.int64), NO_TOKENS)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """num_tokens = T, num_seqs = S, sampled rows = R."""

    chunks: list[ScheduledChunk]
    decode_slots: NDArray[np.intp]
    drafts: Drafts
    copies: list[tuple[int, int]]
    """KV blocks to copy (source, destination) before the step writes."""
    token_ids: NDArray[np.int32]
    """[T]"""
    positions: NDArray[np.int64]
    """[T]: index of each token in its sequence."""
    slot_mapping: NDArray[np.int64]
    """[T]: block · block_size + offset, where the token's KV is written."""
    query_start: NDArray[np.int32]
    """[S + 1]"""
    context_lens: NDArray[np.int32]
    """[S]: tokens that are in the KV cache after this step."""
    block_tables: NDArray[np.int32]
    """[S, max_blocks]"""
    adapters: NDArray[np.int32]
    """[S]: the number of each sequence's adapter, 0 for none."""
    max_query_len: int
    max_context_len: int
    sample_rows: NDArray[np.int64]
    """[R]: rows of the [T] axis whose logits are wanted; a forking prompt's row repeats, and a decode
    has one more for each of its drafts."""
    sample_slots: NDArray[np.intp]
    """[R]"""
    prompt_rows: NDArray[np.int64]
    """[Q]: rows of the [T] axis that tell how likely prompt tokens were; rarely any."""
    prompt_spans: list[PromptSpan]
    """Which tokens those are, in the same order."""
    scheduled_us: int
    """When the step began, by the engine's clock."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return len(self.context_lens) == 0

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return len(self.token_ids) - len(self.decode_slots) - len(self.drafts)

    @property
    def sample_positions(self) -> NDArray[np.int64]:
        """[R]: the index in its sequence of the token that each row gives."""
        return self.positions[self.sample_rows] + 1

    @property
    def num_rows(self) -> int:
        """Rows whose logits are wanted."""
        return len(self.sample_rows) + len(self.prompt_rows)

    @property
    def certain_lens(self) -> NDArray[np.int32]:
        """[S]: tokens in the KV cache after this step that are said, whatever becomes of drafts."""
        certain = self.context_lens.copy()
        certain[len(self.chunks) :] -= self.drafts.num_tokens.astype(np.int32)
        return certain

    @property
    def first_rows(self) -> NDArray[np.intp]:
        """[num_chunk_samples + num_decodes]: where on the [R] axis each sampled sequence begins."""
        num_decode_rows = len(self.decode_slots) + len(self.drafts)
        num_chunk_rows = len(self.sample_rows) - num_decode_rows
        ends = num_chunk_rows + np.cumsum(1 + self.drafts.num_tokens)
        return np.concatenate([np.arange(num_chunk_rows), ends - 1 - self.drafts.num_tokens])

    def drafts_before(self, row: int) -> NDArray[np.int32]:
        """The drafts that count as said where the token of row `row` on the [R] axis is chosen."""
        if len(self.drafts) == 0:
            return NO_TOKENS
        first_rows = self.first_rows
        index = int(np.searchsorted(first_rows, row, side="right")) - 1
        num_chunk_rows = len(first_rows) - len(self.decode_slots)
        if index < num_chunk_rows:
            return NO_TOKENS
        return self.drafts_of(index - num_chunk_rows)[: row - int(first_rows[index])]

    def drafts_of(self, index: int) -> NDArray[np.int32]:
        """The drafts of the decode in `decode_slots[index]`."""
        end = int(self.drafts.num_tokens[: index + 1].sum())
        return self.drafts.token_ids[end - int(self.drafts.num_tokens[index]) : end]


def build_batch(
    slots: SlotTable,
    chunks: list[ScheduledChunk],
    decode_slots: NDArray[np.intp],
    drafts: Drafts,
    copies: list[tuple[int, int]],
    *,
    block_size: int,
    scheduled_us: int,
) -> StepBatch:
    """Gather the arrays of one step from the chunks' sequences and the slot columns."""
    # 1. prefill chunks: one Python turn each, they are few
    starts = np.array([chunk.sequence.num_computed for chunk in chunks], dtype=np.int64)
    lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    token_parts = [
        chunk.sequence.token_ids[start : start + chunk.num_tokens]
        for chunk, start in zip(chunks, starts.tolist(), strict=True)
    ]
    chunk_slots = np.array([chunk.sequence.slot for chunk in chunks], dtype=np.intp)

    # 2. decodes: columns only
    decode_lens = 1 + drafts.num_tokens
    decode_context = slots.num_tokens[decode_slots] + drafts.num_tokens.astype(np.int32)

    # 3. both together
    seq_slots = np.concatenate([chunk_slots, decode_slots])
    context_lens = np.concatenate([(starts + lens).astype(np.int32), decode_context])
    query_lens = np.concatenate([lens, decode_lens])
    query_start = np.zeros(len(seq_slots) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    positions = _positions(query_start, query_lens, context_lens)
    owner = np.repeat(seq_slots, query_lens)
    blocks = slots.block_tables[owner, positions // block_size].astype(np.int64)
    max_context_len = int(context_lens.max(initial=0))
    chunk_rows, chunk_sample_slots = _chunk_samples(chunks, query_start)
    decode_rows = np.arange(query_start[len(chunks)], query_start[-1], dtype=np.int64)
    prompt_rows, prompt_spans = _prompt_rows(chunks, query_start)
    return StepBatch(
        chunks=chunks,
        decode_slots=decode_slots,
        drafts=drafts,
        copies=copies,
        token_ids=np.concatenate([*token_parts, _decode_tokens(slots, decode_slots, drafts)]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=slots.block_tables[seq_slots, : -(-max_context_len // block_size)],
        adapters=slots.adapter[seq_slots],
        max_query_len=int(query_lens.max(initial=0)),
        max_context_len=max_context_len,
        sample_rows=np.concatenate([np.array(chunk_rows, dtype=np.int64), decode_rows]),
        sample_slots=np.concatenate(
            [np.array(chunk_sample_slots, dtype=np.intp), np.repeat(decode_slots, decode_lens)]
        ),
        prompt_rows=prompt_rows,
        prompt_spans=prompt_spans,
        scheduled_us=scheduled_us,
    )


def _decode_tokens(
    slots: SlotTable, decode_slots: NDArray[np.intp], drafts: Drafts
) -> NDArray[np.int32]:
    """Each decode's last token, and its drafts behind it."""
    lasts = slots.last_token[decode_slots]
    ends = np.cumsum(drafts.num_tokens)
    return np.insert(drafts.token_ids, ends - drafts.num_tokens, lasts)


def _positions(
    query_start: NDArray[np.int32], query_lens: NDArray[np.int64], context_lens: NDArray[np.int32]
) -> NDArray[np.int64]:
    """[T]: each query token's index in its sequence; the last one is context_len - 1."""
    first = context_lens - query_lens - query_start[:-1]
    return np.arange(query_start[-1], dtype=np.int64) + np.repeat(first, query_lens)


def _chunk_samples(
    chunks: list[ScheduledChunk], query_start: NDArray[np.int32]
) -> tuple[list[int], list[int]]:
    """The last row of every finishing chunk, once for each of its choices, and their slots."""
    rows: list[int] = []
    sample_slots: list[int] = []
    for index, chunk in enumerate(chunks):
        rows += [int(query_start[index + 1]) - 1] * len(chunk.sample_slots)
        sample_slots += chunk.sample_slots
    return rows, sample_slots


def _prompt_rows(
    chunks: list[ScheduledChunk], query_start: NDArray[np.int32]
) -> tuple[NDArray[np.int64], list[PromptSpan]]:
    """The rows before the prompt tokens whose logprobs are wanted, and those tokens."""
    rows: list[NDArray[np.int64]] = [NO_ROWS]
    spans: list[PromptSpan] = []
    for chunk, start in zip(chunks, query_start.tolist(), strict=False):
        sequence = chunk.sequence
        positions = sequence.prompt_logprobs_in(chunk.num_tokens)
        if positions:
            first = start + positions.start - 1 - sequence.num_computed
            rows.append(np.arange(first, first + len(positions), dtype=np.int64))
            spans.append(PromptSpan(sequence, positions))
    return np.concatenate(rows) if spans else NO_ROWS, spans
