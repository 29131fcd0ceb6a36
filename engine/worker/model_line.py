"""The line between one model's queue and its engine, on the worker's I/O thread.

A line is open while the model is loaded: it takes requests and carries frames. While it is not, only
heartbeats leave: one that finds something queued makes the model wanted, and what is queued waits
there until the model is loaded.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from engine.broker.errors import BrokerUnreachable
from engine.broker.window import NO_ROOM, TakeRoom, take_room
from engine.broker.worker import Exchange, Lost, Outgoing, WorkerBroker
from engine.messages import (
    Cancel,
    CheckIntegrity,
    Drain,
    EndChoice,
    Extend,
    GenerateRequest,
    Heartbeat,
    IntegrityReport,
    StepFrames,
    TokenFrame,
    WorkerState,
)
from engine.output import Ended, StepOutput
from engine.settings import EngineSettings
from engine.worker.mailbox import Bells, EngineNews, Mailbox

logger = structlog.get_logger(__name__)

LISTEN_S = 1.0
"""Longest sleep of the listener: how late it notices that it should stop."""

Describe = Callable[[WorkerState, IntegrityReport | None], Heartbeat]


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


@dataclass(slots=True)
class _Wishes:
    """What other threads want of the line; under its lock."""

    mailbox: Mailbox | None = None
    """Open with this one."""
    close_by: float | None = None
    """Close, whatever still runs at this time of the monotonic clock."""
    is_for_good: bool = False
    """And never open again."""


class ModelLine:
    """What a worker holds of one model. `open`, `close` and what `is_…` says are for any thread."""

    def __init__(
        self,
        broker: WorkerBroker,
        settings: EngineSettings,
        bells: Bells,
        describe: Describe,
        *,
        on_wanted: Callable[[], None] | None = None,
    ) -> None:
        self.broker = broker
        self.state: WorkerState = "unloaded"
        """What the heartbeat says."""
        self.idle_since_s = time.monotonic()
        """When the last request ended; only meaningful while `is_idle`."""
        self.wanted_since_s: float | None = None
        """Since when requests have waited for a model that is not loaded."""
        self._settings = settings
        self._bells = bells
        self._describe = describe
        self._on_wanted = on_wanted or (lambda: None)
        self._mailbox: Mailbox | None = None
        self._unsent = _Unsent()
        self._requests: dict[str, GenerateRequest] = {}
        """Taken and not finished, by id."""
        self._integrity: IntegrityReport | None = None
        self._lock = threading.Lock()
        self._wishes = _Wishes()
        self._close_by: float | None = None
        self._is_leaving = False
        self._closed = threading.Event()
        self._closed.set()
        self._stop_wanted = threading.Event()
        self._can_take = threading.Event()
        self._is_window_full = False
        """The room that is left is for tenants that have nothing waiting here."""
        self._has_word = False
        self._due = dict.fromkeys(("heartbeat", "renew", "nodes"), 0.0)

    # for any thread

    @property
    def is_idle(self) -> bool:
        """Whether no request of the model is here."""
        return not self._requests

    @property
    def is_closed(self) -> bool:
        """Whether nothing is taken, held or unsent."""
        return self._closed.is_set()

    def open(self, mailbox: Mailbox) -> None:
        """The model is loaded: take requests and hand them to its engine by `mailbox`."""
        self._closed.clear()
        with self._lock:
            self._wishes.mailbox = mailbox
        self._bells.told.set()

    def close(self, timeout_s: float, *, is_for_good: bool = False) -> None:
        """Take nothing more; what has not started returns to the queue, what runs may end."""
        with self._lock:
            self._wishes.close_by = time.monotonic() + timeout_s
            self._wishes.is_for_good = is_for_good
        self._bells.told.set()

    def wait_until_closed(self) -> None:
        """Sleep until nothing of the model is here any more."""
        self._closed.wait()

    def show(self, state: WorkerState) -> None:
        """Say `state` in the next heartbeat; a model that could not be loaded calls for nothing."""
        self.state = state
        self.wanted_since_s = None
        self._due["heartbeat"] = 0.0
        self._bells.told.set()

    # for the I/O thread

    @property
    def next_due_s(self) -> float:
        """When something is to be said, by the monotonic clock."""
        return min(self._due.values())

    def collect(self) -> None:
        """Hear the engine's news and obey others' wishes."""
        with self._lock:
            wishes, self._wishes = self._wishes, _Wishes()
        self._is_leaving |= wishes.is_for_good
        if wishes.mailbox is not None and not self._is_leaving:
            self._begin(wishes.mailbox)
        if self._mailbox is not None:
            news = self._mailbox.take_news()
            self._integrity = news.integrity or self._integrity
            self._unsent.add(news)
        if wishes.close_by is not None and self._mailbox is not None:
            self._close_by = wishes.close_by
            self.state = "draining"
            self._due["heartbeat"] = 0.0
            self._mailbox.order_drain()
        self._end_if_done()

    def outgoing(self) -> Outgoing | None:
        """What the next round trip carries; None where there is nothing to say or to ask."""
        unsent = self._unsent
        if unsent.is_empty and not self._has_word:
            return None
        by_node = {
            node: StepFrames(worker=self.broker.worker, step=unsent.step, frames=frames)
            for node, frames in unsent.frames.items()
        }
        finished = [ended.request_id for ended in unsent.finished if self._holds(ended)]
        waiting = self._mailbox.stats.waiting_tenants if self._mailbox is not None else ()
        return Outgoing(by_node, unsent.charges, finished, self._room(), waiting)

    def note(self, outgoing: Outgoing, exchange: Exchange) -> bool:
        """The round trip has brought this. Whether an operator wants the worker to drain."""
        for request_id in outgoing.finished:
            del self._requests[request_id]
        withdrawn, self._unsent = self._unsent.withdrawn, _Unsent(step=self._unsent.step)
        self._has_word = False
        self._hand_on(exchange)
        if withdrawn:
            for request_id in withdrawn:
                self._requests.pop(request_id, None)
            self.broker.give_back(withdrawn)
        if self._requests or exchange.requests or outgoing.finished:
            self.idle_since_s = time.monotonic()
        room = self._room()
        self._is_window_full = room.for_any == 0
        if room.is_any:
            self._can_take.set()
        return any(isinstance(message, Drain) for message in exchange.control)

    def keep_alive(self, now_s: float) -> None:
        """Heartbeat, leases, and whether the nodes are there that wait for frames."""
        settings = self._settings
        if self._is_due("heartbeat", now_s, settings.heartbeat_s):
            beat = self._describe(self.state, self._integrity)
            self._stop_lost(self.broker.heartbeat(beat))
            self._has_word = True  # a look at the queue, should a wake-up have been lost
            self._note_queue(now_s)
        if self._is_due("renew", now_s, settings.renew_s) and self._requests:
            self._stop_lost(self.broker.renew(self._requests))
        if self._is_due("nodes", now_s, settings.dead_node_check_s) and self._requests:
            nodes = {request.node for request in self._requests.values()}
            if self._mailbox is not None:
                self._mailbox.order(dead_nodes=self.broker.dead_nodes(nodes))

    def start_listening(self) -> None:
        """Have a thread sleep on the wake-up list from now on."""
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def say_goodbye(self) -> None:
        """Stop listening, and give back what could not end in time."""
        self._stop_wanted.set()
        self._can_take.set()
        try:
            self._give_back()
        except BrokerUnreachable as fault:
            logger.warning("could not give requests back", reason=str(fault))
        self.broker.close()

    # inside

    def _begin(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._close_by = None
        self._integrity = None
        self.wanted_since_s = None
        self.idle_since_s = time.monotonic()
        self.state = "ready"
        self._due["heartbeat"] = 0.0
        self._has_word = True

    def _end_if_done(self) -> None:
        """A closing line is closed when everything has ended, or its time is over."""
        if self._close_by is None:
            return
        is_over = time.monotonic() >= self._close_by
        if not is_over and (self._requests or not self._unsent.is_empty):
            return
        if not self._is_leaving:  # else `say_goodbye` gives back, whether Redis answers or not
            self._give_back()
            self._mailbox = None
            self._unsent = _Unsent(step=self._unsent.step)
        self._close_by = None
        self._closed.set()

    def _give_back(self) -> None:
        if self._requests:
            self.broker.give_back(list(self._requests))
            self._requests.clear()

    def _holds(self, ended: Ended) -> bool:
        """Whether this is the attempt held here; the next one may have been taken already."""
        request = self._requests.get(ended.request_id)
        return request is not None and request.attempt == ended.attempt

    def _room(self) -> TakeRoom:
        if self._mailbox is None or self.state == "draining":
            return NO_ROOM
        stats = self._mailbox.stats
        return take_room(
            num_waiting=stats.num_waiting,
            # What waits for credit runs nowhere: it must not keep others from running.
            num_held=len(self._requests) - stats.num_parked,
            max_running=self._settings.max_running,
            take_window=self._settings.take_window,
        )

    def _hand_on(self, exchange: Exchange) -> None:
        self._requests |= {request.request_id: request for request in exchange.requests}
        control = exchange.control
        checks = [message for message in control if isinstance(message, CheckIntegrity)]
        self._stop_lost(exchange.lost)
        if self._mailbox is not None:
            self._mailbox.order(
                requests=exchange.requests,
                extensions=[message for message in control if isinstance(message, Extend)],
                cancels=[message for message in control if isinstance(message, Cancel)],
                ended_choices=[each for each in control if isinstance(each, EndChoice)],
                checks=checks,
            )
        elif checks:  # nothing is there that could be owned wrongly
            self._integrity = IntegrityReport(checks[-1].token, problems=[])

    def _stop_lost(self, lost: Lost) -> None:
        for request_id, attempt in lost.items():
            if self._holds(Ended(request_id, attempt)):
                del self._requests[request_id]
        if self._mailbox is not None:
            self._mailbox.order(lost=lost)

    def _is_due(self, task: str, now_s: float, interval_s: float) -> bool:
        if now_s < self._due[task]:
            return False
        self._due[task] = now_s + interval_s
        return True

    def _listen(self) -> None:
        """Sleep on the wake-up list while there is room, so that arrivals are seen at once."""
        while not self._stop_wanted.is_set():
            self._can_take.wait()
            try:
                is_awake = self.broker.wait(LISTEN_S, for_newcomers=self._is_window_full)
            except BrokerUnreachable:
                self._stop_wanted.wait(self._settings.redis_backoff_s_max)
                continue
            if is_awake:
                self._can_take.clear()
                self._has_word = True
                self._bells.told.set()

    def _note_queue(self, now_s: float) -> None:
        """Something is queued that nobody takes: the model is wanted."""
        if self.state != "unloaded" or not self.broker.has_queue:
            self.wanted_since_s = None
        elif self.wanted_since_s is None:
            self.wanted_since_s = now_s
            self._on_wanted()
