"""Scales of a KV cache of 8-bit floats: what the checkpoint says, else what a prompt measures.

An element stands for itself times the scale of its layer and head, and its precision is relative: a
scale need only bring what comes between the smallest and the largest 8-bit float. Checkpoints that
were calibrated for such caches bring one scale for a layer, or one for each head. For others the
model runs a prompt with a cache that keeps everything, and the largest key and value of each head
get room to grow fourfold at most. Those scales are powers of two: they round nothing themselves.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import ModelRefused
from engine.models.checkpoint import Checkpoint
from kernels.kv_cache import LARGEST_FLOAT8, PagedKVCache

HEADROOM = 2.0
"""Twice the largest that the prompt had is held; rounding up to a power of two at most doubles it."""
NAMES = (
    "self_attn.{kind}_scale",
    "self_attn.attn.{kind}_scale",
    "self_attn.{kind}_proj.{kind}_scale",
    "self_attn.{kind}_proj.output_scale",
    "self_attn.kv_scale",
)
"""Where checkpoints keep them, `kind` being k or v: those that vLLM reads."""


class PromptRunner(Protocol):
    """What is asked of a model whose cache is measured."""

    def run_prompt(self, token_ids: torch.Tensor, kv_cache: PagedKVCache) -> None:
        """Leave the keys and values of one prompt [T] in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """[num_layers, num_kv_heads] fp32 each."""

    keys: torch.Tensor
    values: torch.Tensor
    is_measured: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint, num_layers: int, num_kv_heads: int) -> "KVScales | None":
        """The checkpoint's, None where it has none. Raises ModelRefused where they cannot be right."""
        keys, values = (_read(checkpoint, kind, num_layers, num_kv_heads) for kind in ("k", "v"))
        if keys is None or values is None:
            return None
        return cls(keys, values, is_measured=False)

    @classmethod
    def measure(
        cls, model: PromptRunner, token_ids: torch.Tensor, kv_cache: PagedKVCache
    ) -> "KVScales":
        """By a prompt through an exact cache that has room for it, and nothing else in it."""
        model.run_prompt(token_ids, kv_cache)
        return cls(_of(kv_cache.keys), _of(kv_cache.values), is_measured=True)

    def write(self, kv_cache: PagedKVCache) -> None:
        """Let the cache have them; it must be empty."""
        kv_cache.key_scales.copy_(self.keys)
        kv_cache.value_scales.copy_(self.values)

    def __str__(self) -> str:
        origin = "measured scales" if self.is_measured else "the checkpoint's scales"
        return f"8-bit KV cache with {origin}"


def _of(pages: tuple[torch.Tensor, ...]) -> torch.Tensor:
    largest = torch.stack([layer.abs().amax(dim=(0, 2, 3)).float() for layer in pages])
    least = torch.finfo(torch.float32).tiny
    needed = (largest * (HEADROOM / LARGEST_FLOAT8)).clamp(min=least)
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(needed))), 1.0)


def _read(
    checkpoint: Checkpoint, kind: str, num_layers: int, num_kv_heads: int
) -> torch.Tensor | None:
    name = next((each for each in NAMES if checkpoint.has_stored(_name(each, kind, 0))), None)
    if name is None:
        return None
    found = []
    for layer in range(num_layers):
        stored = checkpoint.stored(_name(name, kind, layer)).float().flatten()
        if stored.numel() not in {1, num_kv_heads} or not bool(
            (stored > 0).all() & stored.isfinite().all()
        ):
            raise ModelRefused(
                f"{_name(name, kind, layer)} is no scale of an 8-bit KV cache with"
                f" {num_kv_heads} heads",
                tensor=_name(name, kind, layer),
            )
        found.append(stored.expand(num_kv_heads))
    return torch.stack(found)


def _name(name: str, kind: str, layer: int) -> str:
    return f"model.layers.{layer}." + name.format(kind=kind)
