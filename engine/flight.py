"""A step on its way: what it computes, and who was in it when it left.

While a GPU computes one step the host plans the next. So a result comes back to sequences that may
have ended meanwhile, or lost their slot to another: a token of a row whose slot has changed hands is
nobody's, and is dropped. (What such a row still wrote went into a block of its own at the time; whoever
has the block now writes later on the same stream.)
"""

from dataclasses import dataclass
from typing import Protocol

from engine.batch import AdjustedRow, StepBatch
from engine.models.model import Model
from engine.sampler import Sampled
from engine.scheduling.crew import Crew
from engine.scheduling.slots import SlotTable


class Pending(Protocol):
    """The result of a step that may still be computed."""

    def result(self) -> Sampled:
        """Wait for it. Raises whatever made the step fail."""


class Runner(Protocol):
    """What computes a step."""

    @property
    def model(self) -> Model:
        """The model that it runs."""

    @property
    def is_pooling(self) -> bool:
        """Whether it answers whole prompts with vectors, and never with tokens."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step may start before the result of the last one is known."""

    def start(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Pending:
        """Compute the batch, and what is wanted of its sample rows; the result may come later."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step between its launch and its landing."""

    batch: StepBatch
    crew: Crew
    pending: Pending
