"""Rotary position embedding of q and k, fused with writing k and v into the paged cache.

For the pair (x1, x2) = (x[i], x[i + D/2]) of a head (NeoX halves) at position p:

    x1' = x1 cos(p f_i) - x2 sin(p f_i)
    x2' = x2 cos(p f_i) + x1 sin(p f_i),      f_i = theta^(-2i / D)

Sources: RoFormer, arXiv 2104.09864. Scaling: linear (position interpolation, arXiv 2306.15595),
llama3 (Llama 3.1's `rope_scaling`), yarn (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library as cpu
from kernels.kv_cache import PagedKVCache
from kernels.triton_support import jit, next_power_of_2, runs_triton, tl


@jit
def _rotary_and_write_kv_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """One program does one token: its q in place, its k and v into their page."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    half = tl.arange(0, HALF_BLOCK)  # [HALF_BLOCK]
    is_half = half < HALF
    cos = tl.load(cos_sin_ptr + position * 2 * HALF + half, mask=is_half, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + half, mask=is_half, other=0.0)[None, :]
    # 1. q
    heads = tl.arange(0, HEADS_BLOCK)  # [HEADS_BLOCK]
    mask = (heads < NUM_HEADS)[:, None] & is_half[None, :]
    places = q_ptr + token * q_stride + heads[:, None] * HEAD_DIM + half[None, :]
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = q_ptr.dtype.element_ty
    tl.store(places, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=mask)
    # 2. k: the rotated part, then what lies beyond it
    if slot >= 0:
        kv_heads = tl.arange(0, KV_HEADS_BLOCK)  # [KV_HEADS_BLOCK]
        is_head = (kv_heads < NUM_KV_HEADS)[:, None]
        is_pair = is_head & is_half[None, :]
        page = (slot // PAGE * NUM_KV_HEADS + kv_heads) * PAGE + slot % PAGE
        page = page[:, None] * HEAD_DIM  # [KV_HEADS_BLOCK, 1]
        sources = k_ptr + token * k_stride + kv_heads[:, None] * HEAD_DIM + half[None, :]
        k_first = tl.load(sources, mask=is_pair, other=0.0).to(tl.float32)
        k_second = tl.load(sources + HALF, mask=is_pair, other=0.0).to(tl.float32)
        cache_dtype = keys_ptr.dtype.element_ty
        targets = keys_ptr + page + half[None, :]
        tl.store(targets, (k_first * cos - k_second * sin).to(cache_dtype), mask=is_pair)
        tl.store(targets + HALF, (k_second * cos + k_first * sin).to(cache_dtype), mask=is_pair)
        channels = tl.arange(0, HEAD_BLOCK)  # [HEAD_BLOCK]
        is_element = is_head & (channels < HEAD_DIM)[None, :]
        offsets = kv_heads[:, None] * HEAD_DIM + channels[None, :]
        if HALF * 2 < HEAD_DIM:
            is_kept = is_element & (channels >= HALF * 2)[None, :]
            kept = tl.load(k_ptr + token * k_stride + offsets, mask=is_kept, other=0.0)
            tl.store(keys_ptr + page + channels[None, :], kept.to(cache_dtype), mask=is_kept)
        # 3. v
        values = tl.load(v_ptr + token * v_stride + offsets, mask=is_element, other=0.0)
        tl.store(values_ptr + page + channels[None, :], values.to(cache_dtype), mask=is_element)


def rotary_and_write_kv_with_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """See `rotary_and_write_kv`; the heads of one token must lie side by side."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = kv_cache.num_kv_heads, cos_sin.shape[-1]
    assert q.stride(1) == k.stride(1) == v.stride(1) == head_dim
    assert cos_sin.is_contiguous()
    if num_tokens == 0:
        return
    _rotary_and_write_kv_kernel[(num_tokens,)](
        q,
        k,
        v,
        cos_sin,
        kv_cache.keys[layer],
        kv_cache.values[layer],
        metadata.positions,
        metadata.slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        NUM_HEADS=num_heads,
        HEADS_BLOCK=next_power_of_2(num_heads),
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_BLOCK=next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        HEAD_BLOCK=next_power_of_2(head_dim),
        HALF=half,
        HALF_BLOCK=next_power_of_2(half),
        PAGE=kv_cache.block_size,
        num_warps=4,
    )


def build_cos_sin(
    max_positions: int,
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """The table [max_positions, 2, head_dim / 2] fp32: cosines, then sines.

    `head_dim` is the rotated part of a head. `scaling` is a checkpoint's `rope_scaling` or
    `rope_parameters`; raises ValueError for a kind other than default, linear, llama3 and yarn.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    amplitude = 1.0
    kind = _kind(scaling)
    if scaling is None or kind == "default":
        pass
    elif kind == "linear":
        frequencies = frequencies / float(scaling["factor"])
    elif kind == "llama3":
        frequencies = _scale_llama3(frequencies, scaling)
    elif kind == "yarn":
        frequencies, amplitude = _scale_yarn(frequencies, head_dim, theta, scaling)
    else:
        raise ValueError(f"rotary scaling {kind!r} is not supported")
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * amplitude


def _kind(scaling: Mapping[str, Any] | None) -> str:
    if scaling is None:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _scale_llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Slow waves are slowed by `factor`, fast ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slow = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(is_between, blended, slow)


def _scale_yarn(
    frequencies: torch.Tensor, dim: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Slow the dimensions that turn < beta_slow times, keep those > beta_fast, blend between."""
    factor = float(scaling["factor"])
    original = float(scaling["original_max_position_embeddings"])

    def dimension(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32)
    interpolated = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = frequencies / factor * interpolated + frequencies * (1 - interpolated)
    return scaled, _yarn_amplitude(factor, scaling)


def _yarn_amplitude(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(float(mscale)) / magnitude(float(all_dim))
    return magnitude(1.0)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotated copy of x [T, H, D] by rows [T, 2, R / 2] of the table; dims from R on are kept."""
    half = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [T, 1, R / 2]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = x.clone()
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out


def rotary_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """Rotate q [T, num_heads, D] in place; write rotated k and v [T, num_kv_heads, D] to the cache.

    q, k and v may be views of one projection. cos_sin: [max_positions, 2, R / 2] of
    `build_cos_sin`, R <= D. k itself stays as it is; tokens with slot -1 are not written.
    """
    library = cpu.active()
    if library is not None and kv_cache.is_packed and library.supports(q, k, v):
        return library.rotary_and_write_kv(q, k, v, cos_sin, kv_cache, layer, metadata)
    if runs_triton(q):
        return rotary_and_write_kv_with_triton(q, k, v, cos_sin, kv_cache, layer, metadata)
    rows = cos_sin[metadata.positions]
    q.copy_(rotate(q, rows))
    rotated = rotate(k, rows)
    slots, written = metadata.slot_mapping, metadata.written_tokens
    if written is not None:
        slots, rotated, v = slots[written], rotated[written], v[written]
    return kv_cache.write(layer, slots, rotated, v)
