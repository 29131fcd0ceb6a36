"""What each launch must move and multiply, counted from the very shapes that it is given.

    num_bytes       every input read once, every output written once, at the types they have
    num_operations  a multiplication and an addition count as two

No launch can be faster than a machine moves the one and computes the other. What a kernel reads
twice, or writes for itself (the partial results of split contexts), is its own loss and not counted;
pages that several sequences share are counted for each. Counts are host numbers: a launch's tensors
are looked at for their shapes and types, and for the lengths of contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache

INDEX_BYTES = 4
"""Block tables, context lengths."""
PLACE_BYTES = 8
"""Positions, slots, seeds."""
SAMPLING_BYTES = 3 * 4 + 3 * 8
"""One row's temperature, top-p, min-p; top-k, seed, position."""


class Launch(Protocol):
    """The traffic and the arithmetic of one operation on given shapes."""

    @property
    def num_bytes(self) -> int:
        """Bytes that must be read and written."""

    @property
    def num_operations(self) -> int:
        """Floating-point operations of the formula."""


@dataclass(frozen=True, slots=True)
class RmsNormLaunch:
    """`rms_norm`, or `add_rms_norm` where the residual has bytes."""

    num_rows: int
    hidden: int
    x_bytes: int
    out_bytes: int
    residual_bytes: int = 0
    """Of one element of the residual stream, which is read and written; 0 where there is none."""

    @classmethod
    def of(
        cls, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
    ) -> RmsNormLaunch:
        """x: [..., hidden], weight: [hidden]."""
        hidden = x.shape[-1]
        residual_bytes = 0 if residual is None else residual.itemsize
        return cls(x.numel() // hidden, hidden, x.itemsize, weight.itemsize, residual_bytes)

    @property
    def num_bytes(self) -> int:
        """x, both ways of the residual, the result; the weight once."""
        per_element = self.x_bytes + self.out_bytes + 2 * self.residual_bytes
        return self.num_rows * self.hidden * per_element + self.hidden * self.out_bytes

    @property
    def num_operations(self) -> int:
        """Square and sum, scale twice, and the addition before."""
        per_element = 4 if self.residual_bytes == 0 else 5
        return self.num_rows * self.hidden * per_element


@dataclass(frozen=True, slots=True)
class GatedLaunch:
    """`silu_and_mul`: [T, 2 · intermediate] -> [T, intermediate]."""

    num_tokens: int
    intermediate: int
    element_bytes: int

    @classmethod
    def of(cls, gate_up: torch.Tensor) -> GatedLaunch:
        """gate_up: [T, 2 * intermediate]."""
        return cls(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.itemsize)

    @property
    def num_bytes(self) -> int:
        """Both halves, and the result."""
        return 3 * self.num_tokens * self.intermediate * self.element_bytes

    @property
    def num_operations(self) -> int:
        """Exponential, addition, division, two products."""
        return 5 * self.num_tokens * self.intermediate


@dataclass(frozen=True, slots=True)
class RotaryLaunch:
    """`rotary_and_write_kv`: q turned in place, k turned and stored, v stored."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    element_bytes: int
    cache_bytes: int

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: PagedKVCache,
    ) -> RotaryLaunch:
        """q: [T, num_heads, D], k: [T, num_kv_heads, D], v: [T, num_kv_heads, D_v]."""
        return cls(
            num_tokens=q.shape[0],
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            rotary_dim=cos_sin[0].numel(),
            element_bytes=q.itemsize,
            cache_bytes=kv_cache.keys[0].itemsize,
        )

    @property
    def num_bytes(self) -> int:
        """q both ways, k and v in and into their pages, the angles and the places."""
        q = 2 * self.num_heads * self.rotary_dim * self.element_bytes
        elements = self.num_kv_heads * (self.head_dim + self.value_dim)
        kv = elements * (self.element_bytes + self.cache_bytes)
        return self.num_tokens * (q + kv + 4 * self.rotary_dim + 2 * PLACE_BYTES)

    @property
    def num_operations(self) -> int:
        """Three for each turned element."""
        return 3 * self.num_tokens * (self.num_heads + self.num_kv_heads) * self.rotary_dim


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """`paged_attention` of one layer: decodes, chunks of prompts, or both at once."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int
    cache_bytes: int
    block_size: int
    window: int | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        window: int | None = None,
    ) -> AttentionLaunch:
        """q: [T, num_heads, D]; the lengths are read from the device."""
        starts = metadata.query_starts
        return cls(
            query_lens=tuple(b - a for a, b in zip(starts, starts[1:], strict=False)),
            context_lens=tuple(metadata.context_lengths),
            num_heads=q.shape[1],
            num_kv_heads=kv_cache.num_kv_heads,
            head_dim=q.shape[2],
            value_dim=kv_cache.values[0].shape[-1],
            element_bytes=q.itemsize,
            cache_bytes=kv_cache.keys[0].itemsize,
            block_size=kv_cache.block_size,
            window=window,
        )

    @property
    def num_pairs(self) -> int:
        """(query, visible position) pairs of all sequences."""
        return sum(map(self._pairs, self.query_lens, self.context_lens))

    @property
    def num_read_tokens(self) -> int:
        """Positions whose key and value some query of their sequence sees."""
        return sum(map(self._seen, self.query_lens, self.context_lens))

    @property
    def num_bytes(self) -> int:
        """Keys and values that are seen, q and the result, tables and lengths."""
        sizes = self.head_dim + self.value_dim
        kv = self.num_read_tokens * self.num_kv_heads * sizes * self.cache_bytes
        q_and_out = sum(self.query_lens) * self.num_heads * sizes * self.element_bytes
        seen = map(self._seen, self.query_lens, self.context_lens)
        num_pages = sum(-(-num_tokens // self.block_size) for num_tokens in seen)
        indices = num_pages + 2 * len(self.context_lens) + 1
        return kv + q_and_out + indices * INDEX_BYTES

    @property
    def num_operations(self) -> int:
        """Both products over the visible pairs; the softmax between them is not counted."""
        return 2 * self.num_pairs * self.num_heads * (self.head_dim + self.value_dim)

    def _pairs(self, num_queries: int, length: int) -> int:
        first = length - num_queries + 1  # what the first query sees, itself included
        if self.window is None or length <= self.window:
            return num_queries * (first + length) // 2
        num_growing = max(0, self.window - first)
        growing = num_growing * (first + self.window - 1) // 2
        return growing + (num_queries - num_growing) * self.window

    def _seen(self, num_queries: int, length: int) -> int:
        if self.window is None:
            return length
        return min(length, num_queries + self.window - 1)


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """A product x W^T (+ b), and what becomes of its result."""

    num_tokens: int
    in_features: int
    out_features: int
    weight_bytes: int
    x_bytes: int
    out_bytes: int
    has_bias: bool = False
    residual_bytes: int = 0
    """Of one element of the fp32 stream that the result is added to by another launch; 0: none."""

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> LinearLaunch:
        """x: [T, in_features], weight: [out_features, in_features]."""
        return cls(
            num_tokens=x.shape[0],
            in_features=x.shape[1],
            out_features=weight.shape[0],
            weight_bytes=weight.itemsize,
            x_bytes=x.itemsize,
            out_bytes=x.itemsize,
            has_bias=bias is not None,
            residual_bytes=0 if residual is None else residual.itemsize,
        )

    @property
    def num_bytes(self) -> int:
        """The weight, x, the result; and where it is added to a stream, all of that addition."""
        weight = (self.in_features + self.has_bias) * self.out_features * self.weight_bytes
        x = self.num_tokens * self.in_features * self.x_bytes
        num_out = self.num_tokens * self.out_features
        added = num_out * (self.out_bytes + 2 * self.residual_bytes) if self.residual_bytes else 0
        return weight + x + num_out * self.out_bytes + added

    @property
    def num_operations(self) -> int:
        """Of the product."""
        return 2 * self.num_tokens * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class SamplingLaunch:
    """`sample`: logits [B, vocabulary] -> one token a row."""

    num_rows: int
    vocabulary: int
    logit_bytes: int

    @classmethod
    def of(cls, logits: torch.Tensor) -> SamplingLaunch:
        """logits: [B, vocabulary]."""
        return cls(logits.shape[0], logits.shape[1], logits.itemsize)

    @property
    def num_bytes(self) -> int:
        """The logits once, what each row asks for, and its token."""
        row = self.vocabulary * self.logit_bytes + SAMPLING_BYTES + PLACE_BYTES
        return self.num_rows * row

    @property
    def num_operations(self) -> int:
        """Subtract, divide, exponential, sum."""
        return 4 * self.num_rows * self.vocabulary


@dataclass(frozen=True, slots=True)
class EmbeddingLaunch:
    """The rows of the step's tokens, widened to the fp32 stream."""

    num_tokens: int
    hidden: int
    weight_bytes: int

    @property
    def num_bytes(self) -> int:
        """A row in, a row of fp32 out, an id."""
        return self.num_tokens * (self.hidden * (self.weight_bytes + 4) + PLACE_BYTES)

    @property
    def num_operations(self) -> int:
        """None."""
        return 0


def total_bytes(launches: Sequence[Launch]) -> int:
    """Of all of them."""
    return sum(launch.num_bytes for launch in launches)


def total_operations(launches: Sequence[Launch]) -> int:
    """Of all of them."""
    return sum(launch.num_operations for launch in launches)
