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
    rows = cos_sin[metadata.positions]
    q.copy_(rotate(q, rows))
    rotated = rotate(k, rows)
    slots, written = metadata.slot_mapping, metadata.written_tokens
    if written is not None:
        slots, rotated, v = slots[written], rotated[written], v[written]
    return kv_cache.write(layer, slots, rotated, v)
