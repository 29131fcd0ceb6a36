"""One step's inputs at fixed addresses: a graph that was captured with them finds each step's there.

Everything small lies in one piece of memory, so that a step takes two copies to the device: that piece,
and the rows of the block tables. The host side exists twice: a step is prepared in one while the copy
from the other may still be on its way. By the time the first is used again, its step has ended.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import StepBatch
from engine.device.device import Device
from engine.scheduling.slots import SlotTable
from kernels.attention_metadata import AttentionMetadata
from kernels.attention_workspace import AttentionWorkspace
from kernels.kv_cache import BLOCK_SIZE
from kernels.sampling_batch import SamplingBatch

NUM_SIDES = 2
"""As many steps as may be on their way at once."""
DTYPES: dict[str, torch.dtype] = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "rows": torch.int64,
    "sample_slots": torch.int64,
    "logprob_rows": torch.int64,
    "top_k": torch.int64,
    "seeds": torch.int64,
    "sample_positions": torch.int64,
    "decode_slots": torch.int64,
    "query_start": torch.int32,
    "context_lens": torch.int32,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
}
"""Those of 8 bytes first, so that each lies at a multiple of its size."""


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The largest step that buffers are made for."""

    num_tokens: int
    num_sequences: int
    num_rows: int
    num_blocks: int
    """Width of the block tables."""

    def of(self, name: str) -> int:
        """Elements of the array of that name."""
        if name in {"token_ids", "positions", "slot_mapping"}:
            return self.num_tokens
        if name in {"context_lens", "decode_slots"}:
            return self.num_sequences
        return self.num_sequences + 1 if name == "query_start" else self.num_rows


@dataclass(frozen=True, slots=True)
class Padding:
    """What fills a batch up to its graph's size: sequences of one token, in a page of nobody's."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Side:
    """One host side: what is copied, and numpy's views of it."""

    packed: torch.Tensor
    tables: torch.Tensor
    arrays: dict[str, NDArray[np.generic]]
    table_rows: NDArray[np.int32]


class StepBuffers:
    """The device's arrays, and the host's to fill them from."""

    def __init__(self, device: Device, sizes: BufferSizes, padding: Padding) -> None:
        self.sizes = sizes
        self._device = device
        self._padding = padding
        num_bytes = sum(sizes.of(name) * dtype.itemsize for name, dtype in DTYPES.items())
        where = device.torch_device
        self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=where)
        self._arrays = _split(self._packed, sizes)
        shape = (sizes.num_sequences, sizes.num_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=where)
        self._workspace = AttentionWorkspace(where)
        self._sides = [self._side(num_bytes, shape) for _ in range(NUM_SIDES)]
        self._turn = 0

    def array(self, name: str, length: int) -> torch.Tensor:
        """The first `length` elements of an array on the device."""
        return self._arrays[name][:length]

    def metadata(
        self, num_tokens: int, num_sequences: int, *, max_query_len: int, max_context_len: int
    ) -> AttentionMetadata:
        """Of a step of so many tokens: views of the same memory whatever the step."""
        return AttentionMetadata(
            query_start=self.array("query_start", num_sequences + 1),
            context_lens=self.array("context_lens", num_sequences),
            block_tables=self._tables[:num_sequences],
            positions=self.array("positions", num_tokens),
            slot_mapping=self.array("slot_mapping", num_tokens),
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            shared_workspace=self._workspace,
        )

    def sampling(self, num_rows: int, *, is_all_greedy: bool) -> SamplingBatch:
        """How the first `num_rows` rows are sampled."""
        return SamplingBatch(
            temperature=self.array("temperature", num_rows),
            top_p=self.array("top_p", num_rows),
            top_k=self.array("top_k", num_rows),
            min_p=self.array("min_p", num_rows),
            seeds=self.array("seeds", num_rows),
            positions=self.array("sample_positions", num_rows),
            is_all_greedy=is_all_greedy,
        )

    def load(self, batch: StepBatch, slots: SlotTable, num_padded: int = 0) -> None:
        """Queue the copies of a step; a batch of decodes may be filled up to `num_padded`."""
        side = self._next_side()
        num_sequences = len(batch.context_lens)
        self._fill(side, batch, slots)
        if num_padded > num_sequences:
            self._pad(side, num_sequences, num_padded)
        num_rows = max(num_sequences, num_padded)
        self._device.upload(self._packed, side.packed)
        self._device.upload(self._tables[:num_rows], side.tables[:num_rows])

    def load_padding(self) -> None:
        """Queue the copies of a step of nobody's: what graphs are captured with."""
        side = self._next_side()
        self._pad(side, 0, self.sizes.num_sequences)
        self._device.upload(self._packed, side.packed)
        self._device.upload(self._tables, side.tables)

    def _next_side(self) -> _Side:
        side = self._sides[self._turn]
        self._turn = (self._turn + 1) % NUM_SIDES
        return side

    def _fill(self, side: _Side, batch: StepBatch, slots: SlotTable) -> None:
        sampled = batch.sample_slots
        wanted = np.flatnonzero(slots.num_logprobs[sampled] >= 0)
        content: dict[str, NDArray[np.generic]] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "rows": np.concatenate([batch.sample_rows, batch.prompt_rows]),
            "sample_slots": sampled,
            "logprob_rows": wanted,
            "top_k": slots.top_k[sampled],
            "seeds": slots.seed[sampled],
            "sample_positions": slots.num_tokens[sampled],
            "decode_slots": batch.decode_slots,
            "query_start": batch.query_start,
            "context_lens": batch.context_lens,
            "temperature": slots.temperature[sampled],
            "top_p": slots.top_p[sampled],
            "min_p": slots.min_p[sampled],
        }
        for name, values in content.items():
            side.arrays[name][: len(values)] = values
        num_sequences, num_blocks = batch.block_tables.shape
        side.table_rows[:num_sequences, :num_blocks] = batch.block_tables

    def _pad(self, side: _Side, start: int, end: int) -> None:
        arrays, padding = side.arrays, self._padding
        for name in ("token_ids", "positions"):
            arrays[name][start:end] = 0
        arrays["slot_mapping"][start:end] = padding.block * BLOCK_SIZE
        arrays["rows"][start:end] = np.arange(start, end)
        arrays["decode_slots"][start:end] = padding.slot
        arrays["query_start"][start + 1 : end + 1] = np.arange(start + 1, end + 1)
        arrays["context_lens"][start:end] = 1
        side.table_rows[start:end, 0] = padding.block

    def _side(self, num_bytes: int, shape: tuple[int, int]) -> _Side:
        packed = self._device.pinned((num_bytes,), torch.uint8)
        tables = self._device.pinned(shape, torch.int32)
        arrays = {name: part.numpy() for name, part in _split(packed, self.sizes).items()}
        return _Side(packed, tables, arrays, tables.numpy())


def _split(packed: torch.Tensor, sizes: BufferSizes) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    start = 0
    for name, dtype in DTYPES.items():
        end = start + sizes.of(name) * dtype.itemsize
        parts[name] = packed[start:end].view(dtype)
        start = end
    return parts
