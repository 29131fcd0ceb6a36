"""The oracles: every operation as its formula reads, one token at a time, in float64.

Slow on purpose and sharing no code with what they check.
"""

from __future__ import annotations

import math

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.double()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; float64."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return gate / (1 + torch.exp(-gate)) * up


def rotate(x: torch.Tensor, positions: list[int], theta: float, rotary_dim: int) -> torch.Tensor:
    """x [T, H, D] with the first rotary_dim of each head rotated as complex numbers; float64."""
    out = x.double().clone()
    half = rotary_dim // 2
    for t, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(x.shape[1]):
                pair = complex(float(x[t, head, i]), float(x[t, head, i + half])) * turn
                out[t, head, i], out[t, head, i + half] = pair.real, pair.imag
    return out


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
    """Softmax attention, one query of one head at a time, each position looked up in its page."""
    out = torch.full((*q.shape[:2], kv_cache.value_dim), float("nan"), dtype=torch.float64)
    group = q.shape[1] // kv_cache.num_kv_heads
    size = kv_cache.block_size
    keys, values = kv_cache.keys[layer].double(), kv_cache.values[layer].double()
    starts = metadata.query_start.tolist()
    for i, length in enumerate(metadata.context_lens.tolist()):
        table = metadata.block_tables[i].tolist()
        for t in range(starts[i], starts[i + 1]):
            position = length - (starts[i + 1] - t)
            first = 0 if window is None else max(0, position - window + 1)
            blocks = torch.tensor([table[j // size] for j in range(first, position + 1)])
            offsets = torch.tensor([j % size for j in range(first, position + 1)])
            for head in range(q.shape[1]):
                kv_head = head // group
                k, v = keys[blocks, kv_head, offsets], values[blocks, kv_head, offsets]
                k = k * kv_cache.key_scales[layer, kv_head]  # [positions, head_dim]
                v = v * kv_cache.value_scales[layer, kv_head]
                scores = k @ q[t, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                    v = torch.cat([v, torch.zeros_like(v[:1])])
                out[t, head] = torch.softmax(scores, dim=0) @ v
    return out


def kept_probabilities(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The distribution that one row [V] of logits is sampled from, by a plain sort; float64."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    order = sorted(range(len(probabilities)), key=lambda i: -float(probabilities[i]))
    if top_k > 0:
        order = order[:top_k]
    total = sum(float(probabilities[i]) for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if kept and (mass >= top_p * total or probabilities[i] < min_p * probabilities[order[0]]):
            break
        kept.append(i)
        mass += float(probabilities[i])
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


def quantise(x: torch.Tensor, group_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, K] -> integers [T, K] in -127..127 and a scale for each group of a row [T, groups]."""
    integers, scales = torch.zeros(x.shape, dtype=torch.int8), []
    for first in range(0, x.shape[1], group_length):
        group = x[:, first : first + group_length].float()
        largest = group.abs().amax(dim=1, keepdim=True)
        # NOTE: torch computes `127 / x` as 127 times a rounded reciprocal.
        factor = torch.where(largest < 1e-36, 0, torch.full_like(largest, 127) / largest)
        integers[:, first : first + group_length] = (group * factor).round().to(torch.int8)
        scales.append(largest / 127)
    return integers, torch.cat(scales, dim=1)


def dequantise(integers: torch.Tensor, scales: torch.Tensor, group_length: int) -> torch.Tensor:
    """What `quantise` stands for, in float64."""
    wide = scales.double().repeat_interleave(group_length, dim=1)
    return integers.double() * wide[:, : integers.shape[1]]
