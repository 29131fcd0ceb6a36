"""What the engine asks of a model, whichever tier it is of."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.models.adapters.rows import AdapterRows
from engine.models.adapters.weights import Adapter
from kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers of a model that the engine plans with."""

    vocab_size: int
    context_length: int
    """Longest prompt plus output."""
    bytes_per_block: int
    """KV cache bytes of one block over all layers; 0 when a sequence takes no more as it grows."""
    bytes_per_sequence: int = 0
    """Bytes of a state that every running sequence has, however long it is."""
    shares_blocks: bool = True
    """Whether sequences may hold blocks in common: prefix hits, and choices of one prompt."""
    can_rewind: bool = True
    """Whether a step may compute tokens that turn out not to be said: the next ones are written over
    them. What a recurrent state has taken in, it keeps."""
    weight_bytes: int = 0
    """Weights that every step reads; 0 where the model cannot tell."""


class KVBlocks(Protocol):
    """The KV cache as the engine sees it: numbered blocks whose content is the model's affair."""

    def copy_block(self, source: int, destination: int) -> None:
        """Make `destination` hold what `source` holds, in every layer."""


class Model(Protocol):
    """A loaded model. Writes the KV of the step's tokens, and nothing else, into the cache."""

    @property
    def spec(self) -> ModelSpec:
        """Its numbers."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    def create_kv_cache(self, num_blocks: int) -> KVBlocks:
        """A zero-filled KV cache of its shape."""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids: [T] int64, rows: [R] int64 -> logits of those rows: [R, vocab_size]."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """A model that some sequences of a step may change for themselves. Not for two threads."""

    def attach(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter under a number that was never used. Raises ModelRefused."""

    def detach(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more."""

    def forward_adapted(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        adapters: AdapterRows,
    ) -> torch.Tensor:
        """As `forward`, each row with the adapter of its sequence."""
