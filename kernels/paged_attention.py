"""Attention over the paged KV cache for any mix of prefill, chunked prefill and decode.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h / G]) * v[j, h / G]

over the context positions j <= position(t) of t's own sequence; with a sliding window also
j > position(t) - window; with a softcap s = c * tanh(s / c) before the mask; with sinks the softmax
has one more term, exp(sink[h]), that no value belongs to. G query heads share
one KV head (GQA). Keys and values of this step's tokens must already be in the cache.
"""

from __future__ import annotations

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tile import has_registers_for
from kernels.attention_with_torch import attention_with_torch
from kernels.cpu import attention as cpu_attention
from kernels.cpu import library as cpu
from kernels.kv_cache import PagedKVCache
from kernels.mixed_attention import mixed_with_triton
from kernels.paged_decode_attention import decode_with_triton
from kernels.triton_support import runs_triton


def paged_attention(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from q [T, num_heads, head_dim] to the cache; returns [T, num_heads, value_dim].

    `window` counts the positions that a token sees, itself included. `sinks` [num_heads] adds
    exp(sink) to each head's softmax denominator. On the CPU sequences with one token take the
    decode path and the others the prefill path; on a GPU a step is one launch, of the decode kernel
    or of the mixed one, and nothing is read back.
    """
    library = cpu.active()
    if sinks is None and library is not None and kv_cache.is_packed and library.supports(q):
        return cpu_attention.paged_attention(
            library, q, kv_cache, layer, metadata, scale=scale, window=window, softcap=softcap
        )
    attend = attention_with_torch
    group = q.shape[1] // kv_cache.num_kv_heads
    if runs_triton(q) and has_registers_for(q.dtype, group):
        attend = decode_with_triton if metadata.max_query_len == 1 else mixed_with_triton
    return attend(
        q, kv_cache, layer, metadata, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
