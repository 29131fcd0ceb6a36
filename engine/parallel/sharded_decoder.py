"""One rank's share of the fused decoder: its own heads and channels, sums over all ranks."""

from pathlib import Path

import torch

from engine.errors import ModelRefused
from engine.models.adapters.weights import Adapter
from engine.models.checkpoint import read_json
from engine.models.decoder import Decoder, Weights
from engine.models.decoder_config import DecoderConfig
from engine.parallel.group import RankGroup
from engine.parallel.shards import Shard, ShardCheckpoint
from kernels.cpu.decoder import CpuDecoder
from kernels.linear import PackedLinear, linear


class ShardedDecoder(Decoder):
    """Computes what the whole decoder does, together with the other ranks, in the same calls."""

    def __init__(self, shard: Shard, directory: Path, dtype: torch.dtype, group: RankGroup) -> None:
        self._shard = shard
        self._group = group
        checkpoint = ShardCheckpoint(directory, group.device, shard)
        super().__init__(shard.local_config, checkpoint, dtype, group.device)

    def attach(self, number: int, adapter: Adapter) -> None:
        """Adapters change whole projections. Raises ModelRefused."""
        raise ModelRefused("adapters cannot be added to a model that several ranks share")

    def _create_head(self, weights: Weights, embedding: torch.Tensor) -> PackedLinear:
        if not self.config.has_tied_embeddings:
            return super()._create_head(weights, embedding)
        return weights.tied_head(embedding[self._shard.vocabulary])

    def _compile(self) -> CpuDecoder | None:
        """The compiled step knows of no other ranks."""
        return None

    def _added(
        self, x: torch.Tensor, projection: PackedLinear, hidden: torch.Tensor
    ) -> torch.Tensor:
        if self._group.rank == 0:
            part = super()._added(x, projection, hidden)
        else:
            part = linear(x, projection, dtype=hidden.dtype)
        return self._group.add_up(part)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        part = super()._logits(normed)
        missing = self._shard.vocabulary_width - part.shape[1]
        if missing:
            part = torch.nn.functional.pad(part, (0, missing))
        return self._group.collect(part)[:, : self.config.vocab_size].contiguous()


def load_sharded(directory: Path, dtype: torch.dtype, group: RankGroup) -> ShardedDecoder:
    """This rank's share of a checkpoint. Raises ModelRefused."""
    config = DecoderConfig.parse(read_json(directory / "config.json"))
    shard = Shard(config, group.rank, group.size)
    return ShardedDecoder(shard, directory, dtype, group)
