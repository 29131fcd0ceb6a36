"""Tier three: a transformers model with the cache that it brings along, one for each sequence.

Recurrent states, latent attention, biases by distance: whatever a model keeps of its past stays its
own affair. A sequence is computed by itself, so this tier is slower; scheduler, preemption and
fences are the same. Blocks count memory here and hold nothing, so no two sequences may share one.
"""

import inspect
from enum import StrEnum
from typing import Any

import torch
from transformers import DynamicCache

from engine.models.adapters.hooks import HookedAdapters
from engine.models.adapters.rows import AdapterRows
from engine.models.adapters.weights import Adapter
from engine.models.model import KVBlocks, ModelSpec
from engine.models.original import Original, num_weight_bytes
from engine.models.sequence_states import SequenceState, SequenceStates
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import BLOCK_SIZE


class Continuation(StrEnum):
    """How a model goes on from its past; which one it is, the checks at load decide."""

    CHUNKS = "in chunks"
    """Several tokens at a time, at any point."""
    WHOLE_PROMPT = "with whole prompts"
    """Several tokens only at the start: chunks are put together and computed with the last one, or
    from the start again where logits inside the prompt are wanted."""
    RECOMPUTE = "without a cache"
    """Everything again for every token."""


class NoCache(Exception):
    """The model keeps nothing of its past."""


class OwnCacheModel:
    """See `engine.models.model.Model`."""

    def __init__(
        self,
        original: Original,
        continuation: Continuation,
        vocab_size: int,
        context_length: int,
    ) -> None:
        accepted = inspect.signature(original.forward).parameters
        self._original = original
        self._continuation = continuation
        self._takes_positions = "position_ids" in accepted
        self._vocab_size = vocab_size
        self._adapters = HookedAdapters(original, is_head_sampled=False)
        fixed, growing = (0, 0)
        if continuation != Continuation.RECOMPUTE:
            fixed, growing = self._measure_cache(min(context_length, 2 * BLOCK_SIZE))
        self.spec = ModelSpec(
            vocab_size=vocab_size,
            context_length=context_length,
            weight_bytes=num_weight_bytes(original),
            bytes_per_block=growing,
            bytes_per_sequence=fixed,
            shares_blocks=False,
            can_rewind=False,
        )

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self._original.device
        return device

    def create_kv_cache(self, num_blocks: int) -> SequenceStates:
        """States for sequences that will come; they take memory as they grow."""
        return SequenceStates()

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids: [T] int64, rows: [R] int64 -> logits of those rows: [R, vocab_size]."""
        none = [0] * len(metadata.context_lens)
        return self._forward(token_ids, kv_cache, metadata, rows, none)

    def attach(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter under a number that was never used. Raises ModelRefused."""
        self._adapters.attach(number, adapter)

    def detach(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more."""
        self._adapters.detach(number)

    def forward_adapted(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        adapters: AdapterRows,
    ) -> torch.Tensor:
        """As `forward`, each row with the adapter of its sequence."""
        by_sequence = adapters.by_sequence.tolist()
        return self._forward(token_ids, kv_cache, metadata, rows, by_sequence)

    def _forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        by_sequence: list[int],
    ) -> torch.Tensor:
        assert isinstance(kv_cache, SequenceStates)
        starts = metadata.query_start.tolist()
        wanted = rows.tolist()
        found: dict[int, torch.Tensor] = {}
        first_blocks = metadata.block_tables[:, 0].tolist()
        for index, length in enumerate(metadata.context_lens.tolist()):
            start, end = starts[index], starts[index + 1]
            state = self._extend(kv_cache, first_blocks[index], token_ids[start:end], length)
            own = [row for row in wanted if start <= row < end]
            if own or self._continuation == Continuation.CHUNKS:
                self._adapters.only = by_sequence[index]
                logits = self._compute(state)  # [n, vocab], the newest last
                found |= {row: logits[row - end] for row in own}
        self._adapters.only = 0
        if not wanted:
            return torch.empty((0, self._vocab_size), device=self.device)
        return torch.stack([found[row] for row in wanted])

    @staticmethod
    def _extend(
        states: SequenceStates, first_block: int, token_ids: torch.Tensor, length: int
    ) -> SequenceState:
        """The sequence's state with its new tokens; one that starts over forgets its past."""
        if len(token_ids) == length:
            states.by_block[first_block] = SequenceState(token_ids)
            return states.by_block[first_block]
        state = states.by_block[first_block]
        assert len(state.token_ids) + len(token_ids) == length, "a step of this sequence is missing"
        state.token_ids = torch.cat([state.token_ids, token_ids])
        return state

    def _compute(self, state: SequenceState) -> torch.Tensor:
        """Compute the tokens that are not yet in the cache, as `generate` would: [n, vocab]."""
        original, length = self._original, len(state.token_ids)
        uses_cache = self._continuation != Continuation.RECOMPUTE
        if self._continuation == Continuation.WHOLE_PROMPT and length > state.num_computed + 1:
            state.past, state.num_computed = {}, 0
        is_first = state.num_computed == 0
        if uses_cache and is_first:
            state.past = self._new_past()
        options: dict[str, Any] = {"use_cache": uses_cache, **state.past}
        if self._takes_positions:
            options["position_ids"] = torch.arange(length, device=self.device)[None]
        inputs = original.prepare_inputs_for_generation(
            state.token_ids[None],
            next_sequence_length=None if is_first else length - state.num_computed,
            is_first_iteration=is_first,
            attention_mask=torch.ones((1, length), dtype=torch.int64, device=self.device),
            **options,
        )
        output = original(**inputs, return_dict=True)
        if uses_cache:
            # Most call it `cache`, but not all: the model itself knows what to keep of its output.
            state.past |= original._update_model_kwargs_for_generation(output, {})
            state.num_computed = length
        logits: torch.Tensor = output.logits[0]
        return logits

    def _new_past(self) -> dict[str, Any]:
        if not self._original._supports_default_dynamic_cache():
            return {}  # the model makes its own on the first call
        return {"cache": DynamicCache(config=self._original.config.get_text_config(decoder=True))}

    @torch.inference_mode()
    def _measure_cache(self, length: int) -> tuple[int, int]:
        """(bytes that every sequence takes, bytes that a block of its tokens takes)."""
        sizes = []
        for num_tokens in (length // 2, length):
            state = SequenceState(torch.ones(num_tokens, dtype=torch.int64, device=self.device))
            self._compute(state)
            sizes.append(_num_bytes(state.past))
        if sizes[1] == 0:
            raise NoCache("it keeps nothing of its past")
        growing = max(0, sizes[1] - sizes[0]) * BLOCK_SIZE // (length - length // 2)
        return max(0, sizes[1] - growing * length // BLOCK_SIZE), growing


def _num_bytes(past: dict[str, Any]) -> int:
    """Bytes of all tensors that can be reached from a sequence's past, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = [past]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple):
            waiting += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, type | torch.nn.Module):
            waiting += vars(thing).values()
    return sum(storages.values())
