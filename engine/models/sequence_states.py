"""The KV cache of a model that keeps one of its own for every sequence."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class SequenceState:
    """What one sequence has computed, and the tokens that wait for the last chunk."""

    token_ids: torch.Tensor
    """[n]: all tokens so far."""
    past: dict[str, Any] = field(default_factory=dict)
    """What the model asks for when it goes on, by the names of its own arguments."""
    num_computed: int = 0


@dataclass(slots=True)
class SequenceStates:
    """The states by the first block of each sequence's table. See `KVBlocks`."""

    by_block: dict[int, SequenceState] = field(default_factory=dict)

    def keep_only(self, first_blocks: Iterable[int]) -> None:
        """Forget every sequence but those whose tables begin with one of these blocks."""
        kept = set(first_blocks)
        for block in self.by_block.keys() - kept:
            del self.by_block[block]

    def copy_block(self, source: int, destination: int) -> None:
        """Never asked for: blocks are not shared."""
        raise AssertionError("sequences of this tier share no blocks")
