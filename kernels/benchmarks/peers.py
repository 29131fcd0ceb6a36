"""Others' attention over the same keys and values, where it is installed: to compare with on a GPU.

Each peer takes the step as our kernel gets it and returns a call to time, or None where it is not
installed or cannot do it. Whoever wants keys in another order gets them so beforehand: copying them
is not part of what is timed, which favours the peers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache

Run = Callable[[], object]
WORKSPACE_BYTES = 128 << 20
"""As FlashInfer's documentation asks for."""


@dataclass(frozen=True, slots=True)
class PagedCall:
    """One call of paged attention: q [T, num_heads, D], sequences of equal lengths."""

    q: torch.Tensor
    kv_cache: PagedKVCache
    metadata: AttentionMetadata
    scale: float

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return self.metadata.num_sequences

    @property
    def context(self) -> int:
        """The length that all contexts have."""
        return self.metadata.max_context_len

    def batched_queries(self) -> torch.Tensor:
        """q as [B, n, num_heads, D]."""
        return self.q.view(self.num_sequences, -1, *self.q.shape[1:])

    def contiguous_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values without pages: [B, H_kv, context, D]."""
        keys, values = self.kv_cache.gather_blocks(0, self.metadata.block_tables)
        return keys[:, :, : self.context], values[:, :, : self.context]


def torch_sdpa(call: PagedCall) -> Run | None:
    """torch's FlashAttention-2 on contiguous keys; None for a chunk on a prefix, which it lacks."""
    query = call.batched_queries().transpose(1, 2)  # [B, H, n, D]
    num_new = query.shape[2]
    if num_new not in (1, call.context):
        return None
    keys, values = (each.contiguous() for each in call.contiguous_kv())

    def run() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=num_new > 1, scale=call.scale, enable_gqa=True
            )

    return run


def flash_attention(call: PagedCall) -> Run | None:
    """FlashAttention-3 (`flash_attn_interface`), else 2 (`flash_attn`), on contiguous keys."""
    module = _module("flash_attn_interface") or _module("flash_attn")
    if module is None:
        return None
    query = call.batched_queries()
    keys, values = (each.transpose(1, 2).contiguous() for each in call.contiguous_kv())

    def run() -> object:
        return module.flash_attn_func(query, keys, values, softmax_scale=call.scale, causal=True)

    return run


def flashinfer(call: PagedCall) -> Run | None:
    """FlashInfer's paged wrappers on the very pages, planned beforehand as an engine would."""
    module = _module("flashinfer")
    if module is None:
        return None
    cache, metadata = call.kv_cache, call.metadata
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=call.q.device)
    num_pages = -(-call.context // cache.block_size)
    starts = torch.arange(call.num_sequences + 1, dtype=torch.int32, device=call.q.device)
    last = (call.context - 1) % cache.block_size + 1
    last_lens = torch.full_like(metadata.context_lens, last)
    pages = metadata.block_tables[:, :num_pages].reshape(-1)
    heads = (call.q.shape[1], cache.num_kv_heads, call.q.shape[2])
    if metadata.max_query_len == 1:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            starts * num_pages, pages, last_lens, *heads, cache.block_size, q_data_type=call.q.dtype
        )
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            metadata.query_start,
            starts * num_pages,
            pages,
            last_lens,
            *heads,
            cache.block_size,
            causal=True,
            q_data_type=call.q.dtype,
        )
    return lambda: wrapper.run(call.q, (cache.keys[0], cache.values[0]))


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


PREFILL_PEER = "FlashAttention"
PEERS: dict[str, Callable[[PagedCall], Run | None]] = {
    "torch SDPA (flash)": torch_sdpa,
    PREFILL_PEER: flash_attention,
    "FlashInfer": flashinfer,
}
