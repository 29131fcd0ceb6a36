"""What the worker's threads hand to each other: messages in both directions, under one lock."""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.engine import EngineStats, StepOutput
from engine.messages import Cancel, CheckIntegrity, GenerateRequest, IntegrityReport

if TYPE_CHECKING:  # it imports this module
    from engine.structured import CompiledRequest


@dataclass(slots=True)
class EngineOrders:
    """What the engine thread is to do before its next step."""

    requests: list[GenerateRequest] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Attempts of requests that belong to another worker by now: stop them, say nothing."""
    dead_nodes: set[str] = field(default_factory=set)
    checks: list[CheckIntegrity] = field(default_factory=list)
    compiled: "list[CompiledRequest]" = field(default_factory=list)
    is_draining: bool = False
    is_stopping: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not (
            self.requests
            or self.cancels
            or self.lost
            or self.dead_nodes
            or self.checks
            or self.compiled
            or self.is_draining
            or self.is_stopping
        )


@dataclass(slots=True)
class EngineNews:
    """What the engine thread has to tell."""

    outputs: list[StepOutput] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    """Requests that had not started when the drain began."""
    integrity: IntegrityReport | None = None


class Mailbox:
    """Orders for the engine thread, news for the I/O thread. Every method is thread-safe."""

    def __init__(self, stats: EngineStats) -> None:
        self._lock = threading.Lock()
        self._ordered = threading.Condition(self._lock)
        self._told = threading.Condition(self._lock)
        self._orders = EngineOrders()
        self._outputs: deque[StepOutput] = deque()
        self._withdrawn: list[str] = []
        self._integrity: IntegrityReport | None = None
        self._is_woken = False
        self._stats = stats

    # for the I/O thread

    def order(
        self,
        *,
        requests: list[GenerateRequest] | None = None,
        cancels: list[Cancel] | None = None,
        lost: dict[str, int] | None = None,
        dead_nodes: set[str] | None = None,
        checks: list[CheckIntegrity] | None = None,
        compiled: "list[CompiledRequest] | None" = None,
    ) -> None:
        """Leave orders; wakes the engine thread if there are any."""
        with self._lock:
            self._orders.requests += requests or []
            self._orders.cancels += cancels or []
            self._orders.lost |= lost or {}
            self._orders.dead_nodes |= dead_nodes or set()
            self._orders.checks += checks or []
            self._orders.compiled += compiled or []
            if not self._orders.is_empty:
                self._ordered.notify()

    def order_drain(self) -> None:
        """Start nothing more; what waits is withdrawn."""
        with self._lock:
            self._orders.is_draining = True
            self._ordered.notify()

    def order_stop(self) -> None:
        """End the engine thread after its step."""
        with self._lock:
            self._orders.is_stopping = True
            self._ordered.notify()

    def wait_for_news(self, timeout_s: float) -> EngineNews:
        """Sleep until the engine has news, somebody calls `wake`, or the time is over."""
        with self._lock:
            if not (self._outputs or self._withdrawn or self._integrity or self._is_woken):
                self._told.wait(timeout_s)
            self._is_woken = False
            news = EngineNews(list(self._outputs), self._withdrawn, self._integrity)
            self._outputs.clear()
            self._withdrawn = []
            self._integrity = None
            return news

    def wake(self) -> None:
        """Let `wait_for_news` return."""
        with self._lock:
            self._is_woken = True
            self._told.notify()

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its last step."""
        with self._lock:
            return self._stats

    # for the engine thread

    def take_orders(self, *, is_idle: bool) -> EngineOrders:
        """The orders so far; an idle engine sleeps until there are some."""
        with self._lock:
            while is_idle and self._orders.is_empty:
                self._ordered.wait()
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
            self._told.notify()
