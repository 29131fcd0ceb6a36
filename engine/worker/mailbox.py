"""What the worker's threads hand to each other: messages in both directions, a mailbox for each model.

The engine thread sleeps until any model has orders, the I/O thread until any has news: `Bells`.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import (
    Cancel,
    CheckIntegrity,
    EndChoice,
    Extend,
    GenerateRequest,
    IntegrityReport,
)
from engine.output import EngineStats, StepOutput

if TYPE_CHECKING:  # loaded when the first form is asked for
    from engine.structures.grammar import Grammar


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request whose structure is compiled; no grammar where the compiler itself failed."""

    request: GenerateRequest
    grammar: "Grammar | None"


@dataclass(slots=True)
class EngineOrders:
    """What the engine thread is to do before its next step."""

    requests: list[GenerateRequest] = field(default_factory=list)
    extensions: list[Extend] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    ended_choices: list[EndChoice] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Attempts of requests that belong to another worker by now: stop them, say nothing."""
    dead_nodes: set[str] = field(default_factory=set)
    checks: list[CheckIntegrity] = field(default_factory=list)
    compiled: list[CompiledRequest] = field(default_factory=list)
    is_draining: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not (
            self.requests
            or self.extensions
            or self.cancels
            or self.ended_choices
            or self.lost
            or self.dead_nodes
            or self.checks
            or self.compiled
            or self.is_draining
        )


@dataclass(slots=True)
class EngineNews:
    """What the engine thread has to tell."""

    outputs: list[StepOutput] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    """Requests that had not started when the drain began."""
    integrity: IntegrityReport | None = None


@dataclass(frozen=True, slots=True)
class Bells:
    """What the two threads of a worker sleep on. Who wakes clears his bell, then looks everywhere."""

    ordered: threading.Event = field(default_factory=threading.Event)
    """For the engine thread."""
    told: threading.Event = field(default_factory=threading.Event)
    """For the I/O thread."""


class Mailbox:
    """Orders for one model's engine, news for its I/O. Every method is thread-safe."""

    def __init__(self, stats: EngineStats, bells: Bells) -> None:
        self._lock = threading.Lock()
        self._bells = bells
        self._orders = EngineOrders()
        self._outputs: deque[StepOutput] = deque()
        self._withdrawn: list[str] = []
        self._integrity: IntegrityReport | None = None
        self._stats = stats

    # for the I/O thread

    def order(
        self,
        *,
        requests: list[GenerateRequest] | None = None,
        extensions: list[Extend] | None = None,
        cancels: list[Cancel] | None = None,
        ended_choices: list[EndChoice] | None = None,
        lost: dict[str, int] | None = None,
        dead_nodes: set[str] | None = None,
        checks: list[CheckIntegrity] | None = None,
        compiled: list[CompiledRequest] | None = None,
    ) -> None:
        """Leave orders; wakes the engine thread if there are any."""
        with self._lock:
            self._orders.requests += requests or []
            self._orders.extensions += extensions or []
            self._orders.cancels += cancels or []
            self._orders.ended_choices += ended_choices or []
            self._orders.lost |= lost or {}
            self._orders.dead_nodes |= dead_nodes or set()
            self._orders.checks += checks or []
            self._orders.compiled += compiled or []
            is_empty = self._orders.is_empty
        if not is_empty:
            self._bells.ordered.set()

    def order_drain(self) -> None:
        """Start nothing more; what waits is withdrawn."""
        with self._lock:
            self._orders.is_draining = True
        self._bells.ordered.set()

    def take_news(self) -> EngineNews:
        """What the engine has told since the last call."""
        with self._lock:
            news = EngineNews(list(self._outputs), self._withdrawn, self._integrity)
            self._outputs.clear()
            self._withdrawn = []
            self._integrity = None
            return news

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its last step."""
        with self._lock:
            return self._stats

    # for the engine thread

    def take_orders(self) -> EngineOrders:
        """The orders since the last call."""
        with self._lock:
            orders, self._orders = self._orders, EngineOrders()
            return orders

    def tell(
        self,
        stats: EngineStats,
        *,
        output: StepOutput | None = None,
        withdrawn: list[str] | None = None,
        integrity: IntegrityReport | None = None,
    ) -> None:
        """Leave news for the I/O thread and wake it."""
        with self._lock:
            self._stats = stats
            self._withdrawn += withdrawn or []
            self._integrity = integrity or self._integrity
            if output is not None:
                self._outputs.append(output)
        self._bells.told.set()
