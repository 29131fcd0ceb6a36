"""Runs steps on a GPU without waiting for it: decodes as graphs, the tokens stay where they are needed.

    launch of step k+1     its inputs are copied, its kernels queued; the host waits for nothing
    what each slot said    stays on the device, where step k+1 reads it: no token makes a round trip
    result of step k       its tokens were copied into pinned memory; the host waits for that event,
                           while step k+1 already runs

A step of nothing but decodes replays one graph. Others, and those with adapters, are launched kernel by
kernel, as far ahead.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import AdjustedRow, PromptSpan, StepBatch
from engine.device.decode_graphs import DecodeGraphs
from engine.device.device import Device, Event
from engine.device.step_buffers import NUM_SIDES, BufferSizes, Padding, StepBuffers
from engine.device.warm_up import warm_up
from engine.models.adapters.rows import AdapterRows
from engine.models.model import AdaptableModel, Model
from engine.prompt_logprobs import prompt_logprobs
from engine.sampler import LogprobColumns, Sampled, adjust_logits
from engine.scheduling.scheduler import PROMPT_ROWS_MAX
from engine.scheduling.slots import SlotTable
from kernels.kv_cache import BLOCK_SIZE
from kernels.sampling import sample


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest step that will ever come."""

    num_blocks: int
    max_running: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of the rows that want them, on their way to the host."""

    rows: list[int]
    wanted: NDArray[np.int32]
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The tokens of a step, on their way into pinned memory. See `engine.flight.Pending`."""

    tokens: NDArray[np.int64]
    """Not to be read before the event."""
    copied: Event
    logprobs: _Logprobs | None
    prompt_logits: torch.Tensor
    prompt_spans: list[PromptSpan]

    def result(self) -> Sampled:
        """Wait for the copies."""
        self.copied.wait()
        told = self.logprobs
        logprobs = {} if told is None else told.columns.tell(told.rows, told.wanted)
        sampled = Sampled(self.tokens.copy(), logprobs)
        if self.prompt_spans:  # a step that nobody runs ahead of
            of_prompts = prompt_logprobs(self.prompt_logits, self.prompt_spans)
            sampled = replace(sampled, prompt_logprobs=tuple(of_prompts))
        return sampled


class DeviceRunner:
    """A model with its KV cache on a GPU. See `engine.engine.Runner`."""

    is_pooling = False
    is_ahead = True

    def __init__(self, model: Model, device: Device, limits: RunnerLimits) -> None:
        self.model = model
        self._device = device
        # One page and one slot more than the engine knows: what padding writes to.
        self.kv_cache = model.create_kv_cache(limits.num_blocks + 1)
        padding = Padding(block=limits.num_blocks, slot=limits.max_running)
        where = device.torch_device
        self._last_tokens = torch.zeros(limits.max_running + 1, dtype=torch.int64, device=where)
        self._decode_buffers = StepBuffers(device, _decode_sizes(model, limits), padding)
        self._step_buffers = StepBuffers(device, _step_sizes(model, limits), padding)
        buffers, tokens = self._decode_buffers, self._last_tokens
        self._graphs = DecodeGraphs(device, model, self.kv_cache, buffers, tokens)
        num_rows = self._step_buffers.sizes.num_rows
        pinned = [device.pinned((num_rows,), torch.int64) for _ in range(NUM_SIDES)]
        self._told = [(each, each.numpy()) for each in pinned]
        self._marks: list[Event | None] = [None] * NUM_SIDES
        self._turn = 0
        with torch.inference_mode():
            self._graphs.capture()
            warm_up(
                model,
                self.kv_cache,
                padding.block,
                max_running=limits.max_running,
                max_step_tokens=limits.max_step_tokens,
            )

    @torch.inference_mode()
    def start(
        self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]
    ) -> PendingTokens:
        """Queue the whole step, and the copies of what it gives."""
        # NOTE: the step before the last one has ended long ago, unless it was abandoned.
        if (before_last := self._marks[self._turn]) is not None:
            before_last.wait()
        for source, destination in batch.copies:
            self.kv_cache.copy_block(source, destination)
        is_decode = not batch.chunks and not batch.adapters.any()
        logits, buffers = self._decode(batch, slots) if is_decode else self._step(batch, slots)
        num_samples = len(batch.sample_rows)
        tokens = self._sample(logits[:num_samples], buffers, batch, slots, adjusted)
        logprobs = self._logprobs(logits, tokens, buffers, batch, slots)
        pinned, told = self._told[self._turn]
        self._device.download(pinned[:num_samples], tokens)
        copied = self._device.mark()
        self._marks[self._turn] = copied
        self._turn = (self._turn + 1) % NUM_SIDES
        prompt_logits = logits[num_samples:]
        return PendingTokens(
            told[:num_samples], copied, logprobs, prompt_logits, batch.prompt_spans
        )

    def _decode(self, batch: StepBatch, slots: SlotTable) -> tuple[torch.Tensor, StepBuffers]:
        """One graph: logits of the decodes, and of the padding behind them."""
        bucket = self._graphs.bucket_for(len(batch.decode_slots))
        self._decode_buffers.load(batch, slots, num_padded=bucket)
        return self._graphs.replay(bucket)[: len(batch.decode_slots)], self._decode_buffers

    def _step(self, batch: StepBatch, slots: SlotTable) -> tuple[torch.Tensor, StepBuffers]:
        """Prompts, perhaps with decodes: kernel by kernel, logits of all rows that are wanted."""
        buffers = self._step_buffers
        buffers.load(batch, slots)
        num_tokens, num_decodes = len(batch.token_ids), len(batch.decode_slots)
        token_ids = buffers.array("token_ids", num_tokens)
        if num_decodes:
            last = self._last_tokens.index_select(0, buffers.array("decode_slots", num_decodes))
            token_ids[num_tokens - num_decodes :] = last
        metadata = buffers.metadata(
            num_tokens,
            len(batch.context_lens),
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
        rows = buffers.array("rows", batch.num_rows)
        if not batch.adapters.any():
            return self.model.forward(token_ids, self.kv_cache, metadata, rows), buffers
        # NOTE: which rows an adapter has is copied from pageable memory: the host waits for that.
        assert isinstance(self.model, AdaptableModel)
        wanted = np.concatenate([batch.sample_rows, batch.prompt_rows])
        where = self._device.torch_device
        adapters = AdapterRows.build(batch.adapters, batch.query_start, wanted, where)
        logits = self.model.forward_adapted(token_ids, self.kv_cache, metadata, rows, adapters)
        return logits, buffers

    def _sample(
        self,
        logits: torch.Tensor,
        buffers: StepBuffers,
        batch: StepBatch,
        slots: SlotTable,
        adjusted: list[AdjustedRow],
    ) -> torch.Tensor:
        """[R] tokens, which the slots keep for the next step."""
        num_rows = len(batch.sample_rows)
        is_all_greedy = not slots.temperature[batch.sample_slots].any()
        chosen_from = adjust_logits(logits, adjusted) if adjusted else logits
        sampling = buffers.sampling(num_rows, is_all_greedy=is_all_greedy)
        tokens = sample(chosen_from, sampling)
        # A row that failed has no token; its sequence ends before anybody reads the next one.
        sampled_slots = buffers.array("sample_slots", num_rows)
        self._last_tokens.index_copy_(0, sampled_slots, tokens.clamp(min=0))
        return tokens

    def _logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        buffers: StepBuffers,
        batch: StepBatch,
        slots: SlotTable,
    ) -> _Logprobs | None:
        wanted = slots.num_logprobs[batch.sample_slots]
        rows = np.flatnonzero(wanted >= 0).tolist()
        if not rows:
            return None
        index = buffers.array("logprob_rows", len(rows))
        found = LogprobColumns.of(logits, tokens, index, int(wanted.max()))
        chosen, top, top_ids = map(self._bring, (found.chosen, found.top, found.top_ids))
        columns = LogprobColumns(chosen, top, top_ids)
        return _Logprobs(rows, wanted, columns)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory that the tensor is copied into."""
        pinned = self._device.pinned(tuple(tensor.shape), tensor.dtype)
        self._device.download(pinned, tensor)
        return pinned


def _decode_sizes(model: Model, limits: RunnerLimits) -> BufferSizes:
    most = limits.max_running
    return BufferSizes(most, most, most, _table_width(model, limits))


def _step_sizes(model: Model, limits: RunnerLimits) -> BufferSizes:
    most = limits.max_running
    num_tokens = limits.max_step_tokens + most
    return BufferSizes(num_tokens, most, most + PROMPT_ROWS_MAX, _table_width(model, limits))


def _table_width(model: Model, limits: RunnerLimits) -> int:
    return min(-(-model.spec.context_length // BLOCK_SIZE), limits.num_blocks)
