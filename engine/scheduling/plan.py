"""What a plan depends on, and what it says: the data of `planner.plan`, without its rules."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Limits:
    """The balance of one step; see `EngineSettings` for the meaning of each."""

    block_size: int
    max_step_tokens: int
    untimed_step_tokens: int
    """The whole budget of a step without a cost model."""
    step_s: float
    idle_step_s: float
    gap_s: float
    pace_s: float
    ride_share: float
    crowded_share: float
    prefill_share: float
    paused_share: float
    backfill_lock_s: float
    num_kept_slots: int
    is_whole: bool = False
    """A prompt is computed in one step: the model keeps nothing between two."""


class PrefillState(NamedTuple):
    """A request whose prompt is not wholly computed: waiting, or paused between chunks.

    A tuple, and no frozen dataclass: the 32 of one plan took a tenth of its time more as such (40 us);
    for the same reason it is built by position.
    """

    key: float
    """Seconds of work that remain, aged, and its tenant's surplus; the least goes first."""
    surplus_s: float
    """Seconds of the machine that its tenant is ahead of others who wait."""
    num_computed: int
    """Tokens in the KV cache, or found there by the prefix cache while it waits."""
    num_remaining: int
    num_held: int
    """Blocks in its table, or those of the prefix hit."""
    num_evictable_hits: int
    """Blocks of the hit that nobody references: taking them uses up free blocks."""
    num_reserved: int
    """Blocks that it is expected to take beyond those held: the rest of the prompt and growth."""
    num_slots: int
    is_kept_for: bool
    """Its tenant holds so few slots that those kept for such tenants are for this one too."""
    num_output_left: int
    """Output tokens that it may still generate: the limit, not a prediction."""
    is_admitted: bool
    order: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class DecodeState:
    """The decoding sequences as columns, [num_decodes] each."""

    context_lens: NDArray[np.int32]
    num_new_blocks: NDArray[np.int32]
    """Blocks that this step writes into and that are not held yet (0 or 1)."""
    num_held: NDArray[np.int32]
    num_reserved: NDArray[np.int32]
    """Blocks of expected growth, those of this step included."""
    num_generated: NDArray[np.int32]
    num_output_left: NDArray[np.int32]
    """Output tokens that each may still generate: the limit, not a prediction."""
    num_preemptions: NDArray[np.int32]
    order: NDArray[np.int64]
    silent_s: NDArray[np.float64]
    """Seconds since its last token."""
    ahead_s: NDArray[np.float64]
    """Seconds until its next token is late by its pace; negative where it is late already."""
    is_ahead: NDArray[np.bool_]
    """Its tenant has used more of the machine than others who wait: they come before its pace."""

    def __len__(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True)
class PlannerState:
    """Everything that a plan depends on."""

    prefills: list[PrefillState]
    """All that are admitted, and of those that wait the ones with the least keys."""
    decodes: DecodeState
    num_unstarted: int
    """All requests without a first token, those that `prefills` leaves out included."""
    num_free_blocks: int
    num_blocks: int
    num_free_slots: int
    expected_output_tokens: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of `prefills[index]`."""

    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Indices point into the lists of the `PlannerState`."""

    chunks: list[Chunk]
    decodes: NDArray[np.intp]
    preempted_prefills: list[int]
    preempted_decodes: list[int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be computed."""
        return not self.chunks and len(self.decodes) == 0
