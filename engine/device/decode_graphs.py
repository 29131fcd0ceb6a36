"""Decode steps as CUDA graphs: one for each batch size of a short list, smaller batches filled up.

What a graph launches never depends on how long contexts are: lengths, tables and places are read from
memory when it runs. The last tokens of the sequences are there too, where the step before left them.
"""

from bisect import bisect_left

import torch

from engine.device.device import Captured, Device
from engine.device.step_buffers import StepBuffers
from engine.models.model import KVBlocks, Model

SMALL_BUCKETS = (1, 2, 4)
STEP = 8
"""Beyond the small ones a bucket for every multiple of this, then of 16 times as much."""
STEP_FROM = 128
LARGE_STEP = 32


def decode_buckets(num_sequences_max: int) -> tuple[int, ...]:
    """Batch sizes to capture: at most 7 rows are computed in vain, 31 from 128 on."""
    sizes = [*SMALL_BUCKETS, *range(STEP, STEP_FROM, STEP)]
    sizes += range(STEP_FROM, num_sequences_max + LARGE_STEP, LARGE_STEP)
    smaller = [size for size in sizes if size < num_sequences_max]
    return (*smaller, num_sequences_max)


class DecodeGraphs:
    """Captured when the worker starts; `replay` queues one of them."""

    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: KVBlocks,
        buffers: StepBuffers,
        last_tokens: torch.Tensor,
    ) -> None:
        self._device = device
        self._model = model
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._last_tokens = last_tokens
        self.buckets = decode_buckets(buffers.sizes.num_sequences)
        self._captured: dict[int, Captured] = {}

    def capture(self) -> None:
        """Capture all sizes, the largest first: the others fit into the memory that it took."""
        self._buffers.load_padding()
        for size in reversed(self.buckets):
            self._captured[size] = self._capture(size)

    def bucket_for(self, num_sequences: int) -> int:
        """The smallest captured batch that holds so many."""
        return self.buckets[bisect_left(self.buckets, num_sequences)]

    def replay(self, bucket: int) -> torch.Tensor:
        """Queue the graph of a bucket whose inputs are loaded: logits [bucket, vocab]."""
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.output

    def _capture(self, size: int) -> Captured:
        buffers = self._buffers
        metadata = buffers.metadata(
            size, size, max_query_len=1, max_context_len=self._model.spec.context_length
        )
        slots, rows = buffers.array("decode_slots", size), buffers.array("rows", size)

        def run() -> torch.Tensor:
            token_ids = self._last_tokens.index_select(0, slots)
            return self._model.forward(token_ids, self._kv_cache, metadata, rows)

        return self._device.capture(run)
