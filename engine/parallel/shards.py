"""Which part of every weight a rank has.

    q, k, v, gate, up   rows: whole heads, whole channels      (the input is everybody's)
    o, down             columns; the partial results are added up
    head                rows: a part of the vocabulary; the logits are put side by side
    embedding, norms    whole, on every rank

Where there are fewer KV heads than ranks, neighbours have the same one.
Source: Megatron-LM, arXiv 1909.08053.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.errors import ModelRefused
from engine.models.checkpoint import Checkpoint
from engine.models.decoder_config import DecoderConfig

BIASES_OF_SUMS = ("o_proj.bias", "down_proj.bias")
"""Added once, by rank 0."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a decoder. Raises ModelRefused where it cannot be shared so."""

    config: DecoderConfig
    """Of the whole model."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        config, size = self.config, self.size
        num_kv_heads = config.num_kv_heads
        is_even = (
            config.num_heads % size == 0
            and config.intermediate_size % size == 0
            and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
        )
        if not is_even:
            raise ModelRefused(
                f"{config.num_heads} heads, {num_kv_heads} KV heads and {config.intermediate_size}"
                f" channels cannot be shared by {size} ranks",
                setting="tensor_parallel",
            )

    @property
    def local_config(self) -> DecoderConfig:
        """As if this share were a model."""
        config = self.config
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    @property
    def vocabulary(self) -> slice:
        """The tokens whose logits it computes; the last rank may have fewer than the others."""
        width = self.vocabulary_width
        start = min(self.rank * width, self.config.vocab_size)
        return slice(start, min(start + width, self.config.vocab_size))

    @property
    def vocabulary_width(self) -> int:
        """Most tokens that a rank has."""
        return -(-self.config.vocab_size // self.size)

    def rows(self, name: str) -> slice | None:
        """Which rows of the tensor it has; None for all."""
        config = self.config
        kind = name.rsplit(".", 2)[-2]
        if kind == "q_proj":
            return self._part(config.num_heads * config.head_dim)
        if kind in {"k_proj", "v_proj"}:
            first = self.rank * config.num_kv_heads // self.size * config.head_dim
            return slice(first, first + self.local_config.num_kv_heads * config.head_dim)
        if kind in {"gate_proj", "up_proj"}:
            return self._part(config.intermediate_size)
        return self.vocabulary if kind == "lm_head" else None

    def columns(self, name: str) -> slice | None:
        """Which columns of the tensor it has; None for all."""
        config = self.config
        if name.endswith("o_proj.weight"):
            return self._part(config.num_heads * config.head_dim)
        return self._part(config.intermediate_size) if name.endswith("down_proj.weight") else None

    def _part(self, size: int) -> slice:
        width = size // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


class ShardCheckpoint(Checkpoint):
    """A checkpoint of which only a rank's share is read."""

    def __init__(self, directory: Path, device: torch.device, shard: Shard) -> None:
        super().__init__(directory, device)
        self._shard = shard

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The share of a tensor of which `shape` is the local one. See Checkpoint."""
        shard = self._shard
        rows, columns = shard.rows(name), shard.columns(name)
        whole = list(shape)
        if rows is not None and not name.startswith("lm_head"):
            whole[0] = self._whole(name)
        if columns is not None:
            whole[1] = self._whole(name)
        tensor = super().tensor(name, tuple(whole), dtype)
        if shard.rank > 0 and name.endswith(BIASES_OF_SUMS):
            return torch.zeros_like(tensor)
        if rows is not None:
            tensor = tensor[rows]
        return tensor.contiguous() if columns is None else tensor[:, columns].contiguous()

    def _whole(self, name: str) -> int:
        config = self._shard.config
        kind = name.rsplit(".", 2)[-2]
        if kind in {"q_proj", "o_proj"}:
            return config.num_heads * config.head_dim
        if kind in {"k_proj", "v_proj"}:
            return config.num_kv_heads * config.head_dim
        return config.intermediate_size
