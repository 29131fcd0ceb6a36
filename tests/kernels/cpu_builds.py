"""The C++ library in every form in which it may run, built once per machine and user."""

import fcntl
from pathlib import Path

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import attention as cpu_attention
from kernels.cpu.build import AVX2, NATIVE, build
from kernels.cpu.library import CpuLibrary
from kernels.cpu.page_layout import PANELS
from kernels.kv_cache import PLAIN, PagedKVCache
from tests.conftest import CACHE

KERNELS = CACHE / "cpu-kernels"
"""Every process that a test starts finds the compiled kernels here."""

# name: (compiler flags, whether bf16 is multiplied by the machine's own instruction)
VARIANTS = {
    "native-widened": (NATIVE, False),
    "native-dot": (NATIVE, True),
    "avx2": (AVX2, False),
}


def built(target: tuple[str, ...]) -> Path:
    """The library for this target; two test processes build one after the other."""
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (KERNELS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = build(KERNELS, target)
    assert result.path is not None, result.reason
    return result.path


def in_panels(plain: PagedKVCache, metadata: AttentionMetadata) -> PagedKVCache:
    """A cache in the library's layout with the same tokens, NaN wherever no token lies."""
    cache = PagedKVCache(
        plain.num_layers,
        plain.num_blocks,
        plain.num_kv_heads,
        plain.head_dim,
        plain.dtype,
        "cpu",
        layout=PANELS,
    )
    assert plain.layout is PLAIN
    for layer in range(plain.num_layers):
        cache.keys[layer].fill_(float("nan"))
        cache.values[layer].fill_(float("nan"))
        for table, length in zip(
            metadata.block_tables, metadata.context_lens.tolist(), strict=True
        ):
            positions = torch.arange(length)
            slots = table[positions // 64].long() * 64 + positions % 64
            keys, values = plain.gather(layer, table, length)
            cache.write(layer, slots, keys.transpose(0, 1), values.transpose(0, 1))
    return cache


def attend(
    library: CpuLibrary,
    q: torch.Tensor,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of layer 0 at the usual scale."""
    return cpu_attention.paged_attention(
        library, q, cache, 0, metadata, scale=q.shape[-1] ** -0.5, window=window, softcap=softcap
    )


def oracle(
    q: torch.Tensor,
    plain: PagedKVCache,
    metadata: AttentionMetadata,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention in float64, a whole sequence at a time: `kernels.reference`, but fast."""
    out = torch.empty(q.shape, dtype=torch.float64)
    starts = metadata.query_start.tolist()
    for i, length in enumerate(metadata.context_lens.tolist()):
        own = slice(starts[i], starts[i + 1])
        keys, values = (x.double() for x in plain.gather(0, metadata.block_tables[i], length))
        group = q.shape[1] // len(keys)
        queries = q[own].double().transpose(0, 1)  # [Hq, n, D]
        scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * q.shape[2] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - queries.shape[1], length)[:, None] - torch.arange(length)
        is_hidden = (distance < 0) | (distance >= (window or length))
        weights = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), dim=-1)
        out[own] = (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)
    return out
