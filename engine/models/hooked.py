"""Tier two: any transformers model whose attention can be ours, with the paged KV cache.

All sequences of a step run as one flat row of tokens. Whatever mixes tokens is attention, which
the hook computes over the pages of each sequence; everything else works token by token.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelRefused
from engine.models.adapters.hooks import HookedAdapters
from engine.models.adapters.rows import AdapterRows
from engine.models.adapters.weights import Adapter
from engine.models.dry_run import HOOK, NUM_TOKENS, AttentionCall, NotHookable, set_tap
from engine.models.layered_kv_cache import LayeredKVCache
from engine.models.model import KVBlocks, ModelSpec
from engine.models.original import Original, num_weight_bytes
from kernels.attention_metadata import AttentionMetadata
from kernels.paged_attention import paged_attention


@dataclass(slots=True)
class _Step:
    """The batch that is being computed, and how many attention calls it has seen."""

    kv_cache: LayeredKVCache
    metadata: AttentionMetadata
    num_calls: int = 0


class HookedModel:
    """See `engine.models.model.Model`. Not for two threads: a step is noted while it runs."""

    def __init__(
        self,
        original: Original,
        calls: list[AttentionCall],
        vocab_size: int,
        context_length: int,
    ) -> None:
        accepted = inspect.signature(original.forward).parameters
        if "position_ids" not in accepted:
            raise NotHookable("it takes no positions")
        self._original = original
        self._calls = calls
        self._shapes = [call.cache_shape for call in calls]
        self._keeps_rows = "logits_to_keep" in accepted
        self._step: _Step | None = None
        self._adapters = HookedAdapters(original, is_head_sampled=self._keeps_rows)
        self.spec = ModelSpec(
            vocab_size=vocab_size,
            context_length=context_length,
            weight_bytes=num_weight_bytes(original),
            bytes_per_block=LayeredKVCache.bytes_per_block(self._shapes),
        )
        set_tap(original, self, HOOK)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self._original.device
        return device

    def create_kv_cache(self, num_blocks: int) -> LayeredKVCache:
        """A zero-filled KV cache of its shape."""
        return LayeredKVCache(self._shapes, num_blocks, self.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids: [T] int64, rows: [R] int64 -> logits of those rows: [R, vocab_size]."""
        assert isinstance(kv_cache, LayeredKVCache)
        self._step = _Step(kv_cache, metadata)
        # NOTE: an empty choice of rows would keep all of them in some models; one row is cheap.
        kept = rows if len(rows) else rows.new_zeros(1)
        options = {"logits_to_keep": kept} if self._keeps_rows else {}
        logits: torch.Tensor = self._original(
            input_ids=token_ids[None],
            position_ids=metadata.positions[None],
            use_cache=False,
            **options,
        ).logits[0]
        assert self._step.num_calls == len(self._calls), "the model took another path"
        self._step = None
        return logits[: len(rows)] if self._keeps_rows else logits[rows]

    def attach(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter under a number that was never used. Raises ModelRefused."""
        self._adapters.attach(number, adapter)
        try:
            self._adapters.refuse_unseen(adapter, self._calls_of(adapter), NUM_TOKENS)
        except ModelRefused:
            self._adapters.detach(number)
            raise

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
        self._adapters.tokens, self._adapters.samples = adapters.tokens, adapters.samples
        try:
            return self.forward(token_ids, kv_cache, metadata, rows)
        finally:
            self._adapters.tokens = self._adapters.samples = ()

    @torch.inference_mode()
    def _calls_of(self, adapter: Adapter) -> dict[str, list[int]]:
        """How many rows an adapter's modules see at each call, in a forward of a few tokens."""
        calls: dict[str, list[int]] = {}
        handles = self._adapters.watch(adapter, calls)
        metadata = AttentionMetadata.build(
            query_lens=[NUM_TOKENS],
            context_lens=[NUM_TOKENS],
            block_tables=[[0]],
            device=self.device,
        )
        token_ids = torch.arange(NUM_TOKENS, device=self.device) % self.spec.vocab_size
        try:
            self.forward(token_ids, self.create_kv_cache(1), metadata, token_ids[-1:] * 0)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Write the step's keys and values to their pages, and attend over the pages."""
        step = self._step
        assert step is not None
        call = self._calls[step.num_calls]
        cache, layer = step.kv_cache.place(step.num_calls)
        step.num_calls += 1
        assert call.module is module, "the model took another path"
        q, k, v = (self._rows(x, cache.head_dim) for x in (query, key, value))
        cache.write(layer, step.metadata.slot_mapping, k, v)
        attended = paged_attention(
            q,
            cache,
            layer,
            step.metadata,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=options.get("s_aux"),
        )
        return attended[None, :, :, : call.value_dim], None

    @staticmethod
    def _rows(x: torch.Tensor, head_dim: int) -> torch.Tensor:
        """[1, H, T, D] -> [T, H, head_dim], padded with zeros: they change no product."""
        rows = x[0].transpose(0, 1)
        if rows.shape[-1] < head_dim:
            rows = torch.nn.functional.pad(rows, (0, head_dim - rows.shape[-1]))
        return rows.contiguous()
