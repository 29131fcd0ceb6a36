"""What the engine asks of a GPU beside computing: copies, graphs, events, and how much memory it has.

Everything that is queued happens in the order in which it was queued, on one stream: a step may write
into a block that the step before it still reads, and no event is needed between them. The host learns of
nothing until it waits for an event.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, whoever uses them."""

    free_bytes: int
    total_bytes: int


class Event(Protocol):
    """A point in the queue."""

    def wait(self) -> None:
        """Let the host sleep until everything before the point has happened."""


class Graph(Protocol):
    """Launches that were captured once, with the addresses that they had."""

    def replay(self) -> None:
        """Queue them all again, as one launch."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and where each replay leaves its result."""

    graph: Graph
    output: torch.Tensor


class Device(Protocol):
    """A GPU, or in tests something that keeps account of what one would have done."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that is copied from and to without the host waiting for it."""

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from pinned memory; the source must not change until it has happened."""

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy into pinned memory, which is not to be read until it has happened."""

    def mark(self) -> Event:
        """The point in the queue after everything that has been queued so far."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Captured:
        """Record what `run` launches; its tensors must live as long as the graph does.

        `run` is called beforehand as well, so that nothing is compiled while it is captured.
        """

    def memory(self) -> DeviceMemory:
        """As it is now."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most that `run` has allocated at once, beyond what was allocated before."""
