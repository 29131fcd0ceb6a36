"""Runs one step of a model: copies blocks, moves the batch to the device, samples."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.batch import AdjustedRow, StepBatch
from engine.models.adapters.rows import AdapterRows
from engine.models.model import AdaptableModel, Model
from engine.models.sequence_states import SequenceStates
from engine.prompt_logprobs import prompt_logprobs
from engine.sampler import NOTHING_SAMPLED, Sampled, sample_step
from engine.scheduling.slots import SlotTable
from kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Computed:
    """A step whose result was there when its start returned. See `engine.flight.Pending`."""

    sampled: Sampled

    def result(self) -> Sampled:
        """It."""
        return self.sampled


class ModelRunner:
    """A model with its KV cache. Knows tensors; knows nothing of requests but their sampling."""

    is_pooling = False
    is_ahead = False

    def __init__(self, model: Model, num_blocks: int) -> None:
        self.model = model
        self.kv_cache = model.create_kv_cache(num_blocks)

    def start(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Computed:
        """Compute the whole step. See `engine.engine.Runner`."""
        return Computed(self.run(batch, slots, adjusted))

    @torch.inference_mode()
    def run(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Sampled:
        """Compute the batch's KV, and sample a token for each of its sample rows."""
        if isinstance(self.kv_cache, SequenceStates):
            self.kv_cache.keep_only(slots.first_blocks())
        for source, destination in batch.copies:
            self.kv_cache.copy_block(source, destination)
        if batch.is_empty:
            return NOTHING_SAMPLED
        device = self.model.device
        rows = batch.sample_rows
        if batch.prompt_spans:
            rows = np.concatenate([rows, batch.prompt_rows])
        arguments = (
            torch.from_numpy(batch.token_ids.astype(np.int64)).to(device),
            self.kv_cache,
            attention_metadata(batch, device),
            torch.from_numpy(rows).to(device),
        )
        if batch.adapters.any():
            assert isinstance(self.model, AdaptableModel)
            adapters = AdapterRows.build(batch.adapters, batch.query_start, rows, device)
            logits = self.model.forward_adapted(*arguments, adapters)
        else:
            logits = self.model.forward(*arguments)
        num_samples = len(batch.sample_rows)
        sampled = NOTHING_SAMPLED
        if num_samples:
            sampled = sample_step(logits[:num_samples], batch, slots, adjusted)
        if batch.prompt_spans:
            told = prompt_logprobs(logits[num_samples:], batch.prompt_spans)
            sampled = replace(sampled, prompt_logprobs=tuple(told))
        return sampled


def attention_metadata(batch: StepBatch, device: torch.device) -> AttentionMetadata:
    """Where the batch's tokens are, for the kernels."""
    return AttentionMetadata(
        query_start=torch.from_numpy(batch.query_start).to(device),
        context_lens=torch.from_numpy(batch.context_lens).to(device),
        block_tables=torch.from_numpy(batch.block_tables).to(device),
        positions=torch.from_numpy(batch.positions).to(device),
        slot_mapping=torch.from_numpy(batch.slot_mapping).to(device),
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
    )
