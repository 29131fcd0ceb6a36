"""The worker's I/O loop: one round trip to Redis per engine step, heartbeats, leases, patience.

While Redis does not answer, what runs keeps running: frames wait in their lines, and the loop tries
again with growing pauses.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from engine.broker.errors import BrokerUnreachable
from engine.broker.worker import Exchange, Outgoing, WorkerBroker, exchange_all
from engine.settings import EngineSettings
from engine.worker.mailbox import Bells
from engine.worker.model_line import ModelLine

logger = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
IDLE_S = 1.0
"""Longest sleep of a worker that hosts nothing."""

ExchangeAll = Callable[[Sequence[tuple[WorkerBroker, Outgoing]]], list[Exchange]]


class IoThread:
    """Talks to Redis for every model of one worker. `run` is the thread's whole life."""

    def __init__(
        self,
        bells: Bells,
        settings: EngineSettings,
        lines: Iterable[ModelLine] = (),
        *,
        exchange: ExchangeAll = exchange_all,
    ) -> None:
        self._bells = bells
        self._settings = settings
        self._exchange_all = exchange
        self._lines: tuple[ModelLine, ...] = ()
        self._is_draining = False
        self._drain_timeout_s = settings.drain_timeout_s
        self._drain_wanted = threading.Event()
        self._backoff_s = FIRST_BACKOFF_S
        for line in lines:
            self.add(line)

    def add(self, line: ModelLine) -> None:
        """Serve one more model. (Lines are added and removed by one other thread only.)"""
        line.start_listening()
        self._lines = (*self._lines, line)
        self._bells.told.set()

    def remove(self, line: ModelLine) -> None:
        """Forget a line that is closed."""
        self._lines = tuple(each for each in self._lines if each is not line)
        line.say_goodbye()

    def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing more; `run` returns when what runs has ended, or its time is over."""
        if timeout_s is not None:
            self._drain_timeout_s = timeout_s
        self._drain_wanted.set()
        self._bells.told.set()

    def run(self) -> None:
        """Serve until drained."""
        try:
            while not (self._is_draining and all(line.is_closed for line in self._lines)):
                self._sleep()
                if self._drain_wanted.is_set() and not self._is_draining:
                    self._is_draining = True
                    for line in self._lines:
                        line.close(self._drain_timeout_s, is_for_good=True)
                self._turn()
        finally:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Say the last words that are left, and give back what could not end in time."""
        try:
            self._exchange(self._lines)
        except BrokerUnreachable as fault:
            logger.warning("last words are lost", reason=str(fault))
        for line in self._lines:
            line.say_goodbye()

    def _sleep(self) -> None:
        now_s = time.monotonic()
        due_s = min((line.next_due_s for line in self._lines), default=now_s + IDLE_S)
        self._bells.told.wait(max(0.0, due_s - now_s))
        self._bells.told.clear()

    def _turn(self) -> None:
        """Say what is to be said and hear what there is; keep it all when Redis is away."""
        lines = self._lines
        try:
            for line in lines:
                line.collect()
            self._exchange(lines)
            now_s = time.monotonic()
            for line in lines:
                line.keep_alive(now_s)
        except BrokerUnreachable as fault:
            logger.warning("redis is away", retry_s=self._backoff_s, reason=str(fault))
            time.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, self._settings.redis_backoff_s_max)
            return
        self._backoff_s = FIRST_BACKOFF_S

    def _exchange(self, lines: Sequence[ModelLine]) -> None:
        spoken = [(line, outgoing) for line in lines if (outgoing := line.outgoing()) is not None]
        exchanges = self._exchange_all([(line.broker, outgoing) for line, outgoing in spoken])
        for (line, outgoing), exchange in zip(spoken, exchanges, strict=True):
            if line.note(outgoing, exchange):
                self._drain_wanted.set()
                self._bells.told.set()
