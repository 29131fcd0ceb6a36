"""Rotary position embedding of q and k, fused with their norms and with writing k and v to pages.

For the pair (x1, x2) = (x[i], x[i + D/2]) of a head (NeoX halves) at position p:

    x1' = x1 cos(p f_i) - x2 sin(p f_i)
    x2' = x2 cos(p f_i) + x1 sin(p f_i),      f_i = theta^(-2i / D)

Sources: RoFormer, arXiv 2104.09864. Scaling: linear (position interpolation, arXiv 2306.15595),
llama3 (Llama 3.1's `rope_scaling`), yarn (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.attention_tile import Pages
from kernels.cpu import attention as cpu_attention
from kernels.cpu import library as cpu
from kernels.float8 import to_e4m3
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.rms_norm import rms_norm
from kernels.triton_support import jit, next_power_of_2, runs_triton, tl

# Of the heads that a program holds in registers; those of more heads would spill.
ELEMENTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class QueryKeyNorms:
    """RMS norms of every head of q and k before the rotation, as Qwen 3 and Gemma 3 have them."""

    query: torch.Tensor
    """[head_dim]"""
    key: torch.Tensor
    eps: float


@jit
def _inverse_rms(
    head_ptr: tl.tensor,
    is_head: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
) -> tl.tensor:
    """1 / sqrt(mean(x^2) + eps) of each head: head_ptr and is_head [H, 1] -> [H, 1]."""
    channels = tl.arange(0, HEAD_BLOCK)[None, :]  # [1, HEAD_BLOCK]
    x = tl.load(head_ptr + channels, mask=is_head & (channels < HEAD_DIM), other=0.0)
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]


@jit
def _rotated(
    head_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    is_head: tl.tensor,
    cos_sin: tl.tuple,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> tl.tensor:
    """Heads at head_ptr [H, 1], normalised and rotated, fp32: both halves [H, HALF_BLOCK], the rest.

    The rest [H, HEAD_BLOCK] is what lies beyond the halves; elsewhere it is not to be used.
    """
    cos, sin = cos_sin
    half = tl.arange(0, HALF_BLOCK)[None, :]  # [1, HALF_BLOCK]
    channels = tl.arange(0, HEAD_BLOCK)[None, :]  # [1, HEAD_BLOCK]
    is_pair = is_head & (half < HALF)
    is_rest = is_head & (channels >= 2 * HALF) & (channels < HEAD_DIM)
    first = tl.load(head_ptr + half, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + HALF + half, mask=is_pair, other=0.0).to(tl.float32)
    rest = tl.load(head_ptr + channels, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORMS:
        inverse = _inverse_rms(head_ptr, is_head, eps, HEAD_DIM, HEAD_BLOCK)
        first *= inverse * tl.load(norm_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
        second *= inverse * weight
        weight = tl.load(norm_ptr + channels, mask=channels < HEAD_DIM, other=0.0)
        rest *= inverse * weight.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, rest


@jit
def _rotary_and_write_kv_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    query_norm_ptr: tl.tensor,
    key_norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    FLOAT8: tl.constexpr,
) -> None:
    """One program does one token: its q in place, its k and v into their page."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    half = tl.arange(0, HALF_BLOCK)[None, :]  # [1, HALF_BLOCK]
    channels = tl.arange(0, HEAD_BLOCK)[None, :]  # [1, HEAD_BLOCK]
    is_rest = (channels >= 2 * HALF) & (channels < HEAD_DIM)
    row_ptr = cos_sin_ptr + position * 2 * HALF + half
    cos = tl.load(row_ptr, mask=half < HALF, other=0.0)
    sin = tl.load(row_ptr + HALF, mask=half < HALF, other=0.0)
    # 1. q
    dtype = q_ptr.dtype.element_ty
    for first_head in range(0, NUM_HEADS, HEADS_BLOCK):
        heads = first_head + tl.arange(0, HEADS_BLOCK)[:, None]  # [HEADS_BLOCK, 1]
        is_head = heads < NUM_HEADS
        head_ptr = q_ptr + token * q_stride + heads * HEAD_DIM
        first, second, rest = _rotated(
            *(head_ptr, query_norm_ptr, is_head, (cos, sin), eps),
            *(HEAD_DIM, HEAD_BLOCK, HALF, HALF_BLOCK, HAS_NORMS),
        )
        # In place: every thread has loaded before one of them stores.
        tl.debug_barrier()
        tl.store(head_ptr + half, first.to(dtype), mask=is_head & (half < HALF))
        tl.store(head_ptr + HALF + half, second.to(dtype), mask=is_head & (half < HALF))
        if HAS_NORMS and HALF * 2 < HEAD_DIM:
            tl.store(head_ptr + channels, rest.to(dtype), mask=is_head & is_rest)
    if slot >= 0:
        for first_head in range(0, NUM_KV_HEADS, KV_HEADS_BLOCK):
            # 2. k: the rotated part, then what lies beyond it
            kv_heads = first_head + tl.arange(0, KV_HEADS_BLOCK)[:, None]  # [KV_HEADS_BLOCK, 1]
            is_kv_head = kv_heads < NUM_KV_HEADS
            key_ptr = k_ptr + token * k_stride + kv_heads * HEAD_DIM
            key_first, key_second, key_rest = _rotated(
                *(key_ptr, key_norm_ptr, is_kv_head, (cos, sin), eps),
                *(HEAD_DIM, HEAD_BLOCK, HALF, HALF_BLOCK, HAS_NORMS),
            )
            # 3. v
            columns = tl.arange(0, VALUE_BLOCK)[None, :]  # [1, VALUE_BLOCK]
            is_value = is_kv_head & (columns < VALUE_DIM)
            value_ptr = v_ptr + token * v_stride + kv_heads * VALUE_DIM
            values = tl.load(value_ptr + columns, mask=is_value, other=0.0).to(tl.float32)
            # 4. both into their page
            if FLOAT8 != "none":
                key_scale = tl.load(key_scales_ptr + kv_heads, mask=is_kv_head, other=1.0)
                key_first, key_second = key_first / key_scale, key_second / key_scale
                key_rest = key_rest / key_scale
                values = values / tl.load(value_scales_ptr + kv_heads, mask=is_kv_head, other=1.0)
            stored = keys_ptr.dtype.element_ty
            row = (slot // PAGE * NUM_KV_HEADS + kv_heads) * PAGE + slot % PAGE
            place = keys_ptr + row * HEAD_DIM  # [KV_HEADS_BLOCK, 1]
            is_pair = is_kv_head & (half < HALF)
            tl.store(place + half, to_e4m3(key_first, stored, FLOAT8), mask=is_pair)
            tl.store(place + HALF + half, to_e4m3(key_second, stored, FLOAT8), mask=is_pair)
            if HALF * 2 < HEAD_DIM:
                is_left = is_kv_head & is_rest
                tl.store(place + channels, to_e4m3(key_rest, stored, FLOAT8), mask=is_left)
            value_place = values_ptr + row * VALUE_DIM + columns
            tl.store(value_place, to_e4m3(values, stored, FLOAT8), mask=is_value)


def rotary_and_write_kv_with_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    norms: QueryKeyNorms | None,
) -> None:
    """See `rotary_and_write_kv`; the heads of one token must lie side by side."""
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(1) == k.stride(1) == head_dim
    assert v.stride(1) == kv_cache.value_dim
    assert cos_sin.is_contiguous()
    if num_tokens == 0:
        return
    pages = Pages.of(kv_cache, layer, q.device)
    _rotary_and_write_kv_kernel[(num_tokens,)](
        q,
        k,
        v,
        q if norms is None else norms.query,
        q if norms is None else norms.key,
        cos_sin,
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        metadata.positions,
        metadata.slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0.0 if norms is None else norms.eps,
        **rotary_constants(
            num_heads, kv_cache.num_kv_heads, head_dim, kv_cache.value_dim, cos_sin.shape[-1]
        ),
        HAS_NORMS=norms is not None,
        FLOAT8=pages.float8,
        num_warps=4,
    )


def rotary_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, half: int
) -> dict[str, int]:
    """The compile-time parameters for these heads."""
    at_once = max(1, ELEMENTS_AT_ONCE // next_power_of_2(max(head_dim, value_dim)))
    return {
        "NUM_HEADS": num_heads,
        "HEADS_BLOCK": min(at_once, next_power_of_2(num_heads)),
        "NUM_KV_HEADS": num_kv_heads,
        "KV_HEADS_BLOCK": min(at_once, next_power_of_2(num_kv_heads)),
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": next_power_of_2(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": next_power_of_2(value_dim),
        "HALF": half,
        "HALF_BLOCK": next_power_of_2(half),
        "PAGE": BLOCK_SIZE,
    }


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
    norms: QueryKeyNorms | None = None,
) -> None:
    """Rotate q [T, num_heads, D] in place; write rotated k and v [T, num_kv_heads, D] to the cache.

    q, k and v may be views of one projection. cos_sin: [max_positions, 2, R / 2] of
    `build_cos_sin`, R <= D. With `norms` q and k are normalised first. k itself stays as it is;
    tokens with slot -1 are not written. A cache of 8-bit floats is written in units of its scales.
    """
    if runs_triton(q):
        return rotary_and_write_kv_with_triton(q, k, v, cos_sin, kv_cache, layer, metadata, norms)
    if norms is not None:
        q.copy_(rms_norm(q, norms.query, norms.eps))
        k = rms_norm(k, norms.key, norms.eps)
    library = cpu.active()
    if library is not None and kv_cache.is_packed and library.supports(q, k, v):
        return cpu_attention.rotary_and_write_kv(
            library, q, k, v, cos_sin, kv_cache, layer, metadata
        )
    rows = cos_sin[metadata.positions]
    q.copy_(rotate(q, rows))
    rotated = rotate(k, rows)
    slots, written = metadata.slot_mapping, metadata.written_tokens
    if written is not None:
        slots, rotated, v = slots[written], rotated[written], v[written]
    return kv_cache.write(layer, slots, rotated, v)
