"""Runs one step of a model that pools: whole inputs in, a vector for each out."""

import numpy as np
import torch

from engine.batch import AdjustedRow, StepBatch
from engine.model_runner import Computed, attention_metadata
from engine.models.pooled import PooledModel
from engine.sampler import NO_TOKENS, NOTHING_SAMPLED, Sampled
from engine.scheduling.slots import SlotTable


class PoolingRunner:
    """A model without a KV cache. See `engine.engine.Runner`."""

    is_pooling = True
    is_ahead = False

    def __init__(self, model: PooledModel) -> None:
        self.model = model
        self.kv_cache = model.create_kv_cache(0)

    def start(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Computed:
        """Compute the whole step. See `engine.engine.Runner`."""
        return Computed(self.run(batch, slots, adjusted))

    @torch.inference_mode()
    def run(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Sampled:
        """Compute the batch's vectors. One that is not finite is None."""
        if batch.is_empty:
            return NOTHING_SAMPLED
        assert all(chunk.is_last for chunk in batch.chunks), "an input was cut"
        device = self.model.device
        vectors = self.model.pool(
            torch.from_numpy(batch.token_ids.astype(np.int64)).to(device),
            torch.from_numpy(_types(batch)).to(device),
            attention_metadata(batch, device).query_start,
        )
        rows = vectors.cpu().numpy().astype("<f4")
        is_finite = np.isfinite(rows).all(axis=1).tolist()
        found = zip(rows, is_finite, strict=True)
        return Sampled(
            NO_TOKENS, {}, tuple(row.tobytes() if is_ok else None for row, is_ok in found)
        )


def _types(batch: StepBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[T]: 1 in the second text of a pair, else 0."""
    types = np.zeros(len(batch.token_ids), dtype=np.int64)
    for chunk, start in zip(batch.chunks, batch.query_start.tolist(), strict=False):
        second = chunk.sequence.request.second_text_at
        if second:
            types[start + second : start + chunk.num_tokens] = 1
    return types
