"""A step on its way: what it computes, and who was in it when it left.

While a GPU computes one step the host plans the next. So a result comes back to sequences that may
have ended meanwhile, or lost their slot to another: a token of a row whose slot has changed hands is
nobody's, and is dropped. (What such a row still wrote went into a block of its own at the time; whoever
has the block now writes later on the same stream.)
"""

from dataclasses import dataclass
from typing import Protocol

from engine.batch import StepBatch
from engine.sampler import Sampled
from engine.scheduling.crew import Crew


class Pending(Protocol):
    """The result of a step that may still be computed."""

    def result(self) -> Sampled:
        """Wait for it. Raises whatever made the step fail."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step between its launch and its landing."""

    batch: StepBatch
    crew: Crew
    pending: Pending
