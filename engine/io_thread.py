"""The worker's I/O loop: one round trip to Redis per engine step, heartbeats, leases, patience.

While Redis does not answer, what runs keeps running: frames wait here, and the loop tries again
with growing pauses.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from engine.broker.errors import BrokerUnreachable
from engine.broker.window import NO_ROOM, TakeRoom, take_room
from engine.broker.worker import Exchange, Lost, WorkerBroker
from engine.engine import Ended, StepOutput
from engine.mailbox import EngineNews, Mailbox
from engine.messages import (
    Cancel,
    CheckIntegrity,
    Drain,
    GenerateRequest,
    Heartbeat,
    IntegrityReport,
    StepFrames,
    TokenFrame,
    WorkerState,
)
from engine.settings import EngineSettings

logger = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
LISTEN_S = 1.0
"""Longest sleep of the listener: how late it notices that it should stop."""


@dataclass(slots=True)
class _Unsent:
    """What the next round trip has to carry; grows while Redis is away."""

    frames: dict[str, list[TokenFrame]] = field(default_factory=dict)
    charges: dict[str, float] = field(default_factory=dict)
    finished: list[Ended] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    step: int = 0

    def add(self, news: EngineNews) -> None:
        for output in news.outputs:
            self._add_output(output)
        self.withdrawn += news.withdrawn

    def _add_output(self, output: StepOutput) -> None:
        self.step = output.step
        for node, frames in output.frames.items():
            self.frames.setdefault(node, []).extend(frames)
        for tenant, seconds in output.charges.items():
            self.charges[tenant] = self.charges.get(tenant, 0.0) + seconds
        self.finished += output.finished

    @property
    def is_empty(self) -> bool:
        return not (self.frames or self.charges or self.finished or self.withdrawn)


class IoThread:
    """Talks to Redis for one engine until it is told to stop. `run` is the thread's whole life."""

    def __init__(
        self,
        broker: WorkerBroker,
        mailbox: Mailbox,
        settings: EngineSettings,
        describe: Callable[[WorkerState, IntegrityReport | None], Heartbeat],
    ) -> None:
        self._broker = broker
        self._mailbox = mailbox
        self._settings = settings
        self._describe = describe
        self._unsent = _Unsent()
        self._requests: dict[str, GenerateRequest] = {}
        """Taken and not finished, by id."""
        self._integrity: IntegrityReport | None = None
        self._is_draining = False
        self._drain_timeout_s = settings.drain_timeout_s
        self._drain_wanted = threading.Event()
        self._stop_wanted = threading.Event()
        self._can_take = threading.Event()
        self._has_word = False
        self._due = dict.fromkeys(("heartbeat", "renew", "nodes"), 0.0)
        self._backoff_s = FIRST_BACKOFF_S

    def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing more; `run` returns when what runs has ended, or its time is over."""
        if timeout_s is not None:
            self._drain_timeout_s = timeout_s
        self._drain_wanted.set()
        self._mailbox.wake()

    def run(self) -> None:
        """Serve until drained, then stop the engine thread."""
        listener = threading.Thread(target=self._listen, name="listener", daemon=True)
        listener.start()
        deadline = float("inf")
        try:
            while time.monotonic() < deadline:
                self._unsent.add(self._news())
                if self._drain_wanted.is_set() and not self._is_draining:
                    self._is_draining = True
                    self._mailbox.order_drain()
                    deadline = time.monotonic() + self._drain_timeout_s
                self._turn()
                if self._is_draining and not self._requests and self._unsent.is_empty:
                    return
        finally:
            self._stop_wanted.set()
            self._can_take.set()
            self._say_goodbye()
            self._mailbox.order_stop()

    def _news(self) -> EngineNews:
        now = time.monotonic()
        news = self._mailbox.wait_for_news(max(0.0, min(self._due.values()) - now))
        self._integrity = news.integrity or self._integrity
        return news

    def _turn(self) -> None:
        """Say what is to be said and hear what there is; keep it all when Redis is away."""
        try:
            self._exchange()
            self._keep_alive()
        except BrokerUnreachable as fault:
            logger.warning("redis is away", retry_s=self._backoff_s, reason=str(fault))
            time.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, self._settings.redis_backoff_s_max)
            return
        self._backoff_s = FIRST_BACKOFF_S

    def _exchange(self) -> None:
        unsent = self._unsent
        if unsent.is_empty and not self._has_word:
            return
        by_node = {
            node: StepFrames(worker=self._broker.worker, step=unsent.step, frames=frames)
            for node, frames in unsent.frames.items()
        }
        finished = [ended.request_id for ended in unsent.finished if self._holds(ended)]
        exchange = self._broker.exchange(
            frames_by_node=by_node,
            charges=unsent.charges,
            finished=finished,
            room=self._room(),
            waiting=self._mailbox.stats.waiting_tenants,
        )
        for request_id in finished:
            del self._requests[request_id]
        withdrawn, self._unsent = unsent.withdrawn, _Unsent(step=unsent.step)
        self._has_word = False
        self._note(exchange)
        if withdrawn:
            for request_id in withdrawn:
                self._requests.pop(request_id, None)
            self._broker.give_back(withdrawn)
        # NOTE: not for spare room alone: what is queued of one tenant would wake it all the time.
        if self._room().for_any > 0:
            self._can_take.set()

    def _holds(self, ended: Ended) -> bool:
        """Whether this is the attempt held here; the next one may have been taken already."""
        request = self._requests.get(ended.request_id)
        return request is not None and request.attempt == ended.attempt

    def _room(self) -> TakeRoom:
        if self._is_draining:
            return NO_ROOM
        return take_room(
            num_waiting=self._mailbox.stats.num_waiting,
            num_held=len(self._requests),
            max_running=self._settings.max_running,
            take_window=self._settings.take_window,
        )

    def _note(self, exchange: Exchange) -> None:
        self._requests |= {request.request_id: request for request in exchange.requests}
        control = exchange.control
        if any(isinstance(message, Drain) for message in control):
            self._drain_wanted.set()
        self._stop_lost(exchange.lost)
        self._mailbox.order(
            requests=exchange.requests,
            cancels=[message for message in control if isinstance(message, Cancel)],
            checks=[message for message in control if isinstance(message, CheckIntegrity)],
        )

    def _stop_lost(self, lost: Lost) -> None:
        for request_id, attempt in lost.items():
            if self._holds(Ended(request_id, attempt)):
                del self._requests[request_id]
        self._mailbox.order(lost=lost)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        settings = self._settings
        if self._is_due("heartbeat", now, settings.heartbeat_s):
            state: WorkerState = "draining" if self._is_draining else "ready"
            self._stop_lost(self._broker.heartbeat(self._describe(state, self._integrity)))
            self._has_word = True  # a look at the queue, should a wake-up have been lost
        if self._is_due("renew", now, settings.renew_s) and self._requests:
            self._stop_lost(self._broker.renew(self._requests))
        if self._is_due("nodes", now, settings.dead_node_check_s) and self._requests:
            nodes = {request.node for request in self._requests.values()}
            self._mailbox.order(dead_nodes=self._broker.dead_nodes(nodes))

    def _is_due(self, task: str, now: float, interval_s: float) -> bool:
        if now < self._due[task]:
            return False
        self._due[task] = now + interval_s
        return True

    def _listen(self) -> None:
        """Sleep on the wake-up list while there is room, so that arrivals are seen at once."""
        while not self._stop_wanted.is_set():
            self._can_take.wait()
            try:
                is_awake = self._broker.wait(LISTEN_S)
            except BrokerUnreachable:
                self._stop_wanted.wait(self._settings.redis_backoff_s_max)
                continue
            if is_awake:
                self._can_take.clear()
                self._has_word = True
                self._mailbox.wake()

    def _say_goodbye(self) -> None:
        """Give back what could not end in time."""
        try:
            self._exchange()
            self._broker.give_back(list(self._requests))
        except BrokerUnreachable as fault:
            logger.warning("could not give requests back", reason=str(fault))
