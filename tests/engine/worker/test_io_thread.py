"""The worker's threads against a broker that fails on command."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from engine.broker.errors import BrokerUnreachable
from engine.broker.window import TakeRoom
from engine.broker.worker import Exchange, Lost, Outgoing
from engine.engine import Engine
from engine.messages import Cancel, ControlMessage, GenerateRequest, Heartbeat, StepFrames
from engine.model_runner import ModelRunner
from engine.settings import EngineSettings
from tests.engine.driver import request
from tests.engine.fake_model import FakeModel, expected_output
from tests.engine.worker_threads import WorkerThreads


class ScriptedBroker:
    """The worker's end of the broker, in memory. Not a queue: it hands out what the test put in."""

    worker = "worker-1"
    has_queue = False

    def __init__(self) -> None:
        self.queue: list[GenerateRequest] = []
        self.control: list[ControlMessage] = []
        self.texts: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}
        self.finished: list[str] = []
        self.given_back: list[str] = []
        self.dead: set[str] = set()
        self.lost: dict[str, int] = {}
        self.heartbeats: list[Heartbeat] = []
        self.is_away = False
        self.num_refused = 0
        self._word = threading.Event()

    def _check(self) -> None:
        if self.is_away:
            self.num_refused += 1
            raise BrokerUnreachable("away")

    def put(self, *requests: GenerateRequest) -> None:
        self.queue += requests
        self._word.set()

    def say(self, message: ControlMessage) -> None:
        self.control.append(message)
        self._word.set()

    def wait(self, timeout_s: float, *, for_newcomers: bool = False) -> bool:
        self._check()
        is_awake = self._word.wait(timeout_s)
        self._word.clear()
        return is_awake

    def exchange(
        self,
        *,
        frames_by_node: Mapping[str, StepFrames],
        charges: Mapping[str, float],
        finished: list[str],
        room: TakeRoom,
        waiting: Iterable[str],
    ) -> Exchange:
        self._check()
        for frame in (frame for step in frames_by_node.values() for frame in step.frames):
            text = self.texts.setdefault(frame.request_id, [])
            assert frame.first_index == len(text), "a gap between frames"
            text += frame.token_ids
            self.reasons[frame.request_id] = frame.finish_reason
        self.finished += finished
        spare = [one for one in self.queue[room.for_any :] if one.tenant not in set(waiting)]
        taken = self.queue[: room.for_any] + spare[: room.for_others]
        self.queue = [one for one in self.queue if one not in taken]
        control, self.control = self.control, []
        return Exchange(taken, control, {})

    def heartbeat(self, heartbeat: Heartbeat) -> Lost:
        self._check()
        self.heartbeats.append(heartbeat)
        return {}

    def renew(self, request_ids: Any) -> Lost:
        self._check()
        lost, self.lost = self.lost, {}
        return lost

    def dead_nodes(self, nodes: Any) -> set[str]:
        self._check()
        return self.dead & set(nodes)

    def give_back(self, request_ids: list[str]) -> None:
        self._check()
        self.given_back += request_ids

    def close(self) -> None:
        """There is no connection."""


def exchange_scripted(
    spoken: Sequence[tuple[Any, Outgoing]],
) -> list[Exchange]:
    """One round trip, as `exchange_all` makes it."""
    return [
        broker.exchange(
            frames_by_node=said.frames_by_node,
            charges=said.charges,
            finished=said.finished,
            room=said.room,
            waiting=said.waiting,
        )
        for broker, said in spoken
    ]


class Rig(WorkerThreads):
    """The worker's threads over a fake model."""

    def __init__(self, **changes: Any) -> None:
        settings = EngineSettings(
            heartbeat_s=0.05,
            renew_s=0.05,
            dead_node_check_s=0.05,
            redis_backoff_s_max=0.2,
            **changes,
        )
        self.model = FakeModel()
        self.engine = Engine(ModelRunner(self.model, 64), settings, 64)
        self.broker = ScriptedBroker()
        super().__init__(self.engine, self.broker, settings, exchange=exchange_scripted)

    def until(self, is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    def until_ended(self, num_requests: int) -> None:
        """Until so many requests have ended, or the engine thread has."""
        self.until(lambda: len(self.broker.finished) >= num_requests or bool(self.failures))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.stop()
    assert made.failures == []


PROMPT = [1, 2, 3]


def test_requests_arrive_and_tokens_leave(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 20), request("b", [7, 8], 5))
    rig.until(lambda: set(rig.broker.finished) == {"a", "b"})
    assert rig.broker.texts == {
        "a": expected_output(PROMPT, 20),
        "b": expected_output([7, 8], 5),
    }


def test_what_runs_keeps_running_while_redis_is_away(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 400))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.broker.is_away = True
    rig.until(lambda: rig.engine.stats.output_tokens_total == 400)
    rig.until(lambda: rig.broker.num_refused > 2)
    rig.broker.is_away = False
    rig.until(lambda: rig.broker.finished == ["a"])
    assert rig.broker.texts["a"] == expected_output(PROMPT, 400)


def test_a_cancelled_request_ends_with_abort(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 4000))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.broker.say(Cancel(request_id="a"))
    rig.until(lambda: rig.broker.finished == ["a"])
    assert rig.broker.reasons["a"] == "abort"


def test_a_cancel_of_an_earlier_attempt_is_none_of_the_next(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 60, attempt=2))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.broker.say(Cancel(request_id="a", attempt=1))
    rig.until(lambda: rig.broker.finished == ["a"])
    assert rig.broker.texts["a"] == expected_output(PROMPT, 60)


def test_requests_of_a_dead_node_end_within_its_check(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 4000, node="gone"), request("b", [7, 8], 300, node="here"))
    rig.until(lambda: {"a", "b"} <= set(rig.broker.texts))
    rig.broker.dead = {"gone"}
    rig.until(lambda: set(rig.broker.finished) == {"a", "b"})
    assert rig.broker.reasons["a"] is None, "nothing is said to a dead node"
    assert rig.broker.texts["b"] == expected_output([7, 8], 300)


def test_a_lost_request_stops_without_a_word(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 4000))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.broker.lost = {"a": 1}
    rig.until(lambda: rig.broker.heartbeats[-1].num_running == 0)
    assert rig.broker.reasons["a"] is None
    assert rig.broker.finished == []


def test_an_attempt_that_was_lost_does_not_take_the_next_one_along(rig: Rig) -> None:
    rig.broker.put(request("a", PROMPT, 60, attempt=2))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.broker.lost = {"a": 1}
    rig.until(lambda: rig.broker.finished == ["a"])
    assert rig.broker.texts["a"] == expected_output(PROMPT, 60)


def test_no_more_is_taken_than_can_soon_start() -> None:
    rig = Rig(max_running=2, take_window=3)
    rig.broker.put(*(request(f"r{index}", PROMPT, 300) for index in range(20)))
    rig.until(lambda: len(rig.broker.texts) >= 2)
    time.sleep(0.2)
    assert len(rig.broker.queue) >= 20 - (2 + 2 * 3)
    rig.until(lambda: len(rig.broker.finished) == 20, 60)
    rig.stop()


def test_a_drain_finishes_what_runs_and_gives_the_waiting_back() -> None:
    rig = Rig(max_running=1, take_window=4)
    rig.broker.put(request("a", PROMPT, 500), request("b", [7, 8], 5))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.io.drain()
    rig.join()
    assert rig.broker.texts["a"] == expected_output(PROMPT, 500)
    assert "b" in rig.broker.given_back + [one.request_id for one in rig.broker.queue]
    assert rig.broker.heartbeats[-1].state == "draining"


def test_a_drain_has_an_end_and_gives_back_what_still_runs() -> None:
    rig = Rig(drain_timeout_s=0.1)
    rig.broker.put(request("a", PROMPT, 4000))
    rig.until(lambda: "a" in rig.broker.texts)
    rig.stop()
    assert rig.broker.given_back == ["a"]


def test_a_failing_step_ends_its_requests_and_the_next_ones_run(rig: Rig) -> None:
    rig.model.fails_on_token = 511
    rig.broker.put(request("bad", [511], 5))
    rig.until(lambda: rig.broker.finished == ["bad"])
    assert rig.broker.reasons["bad"] == "error"
    rig.broker.put(request("good", PROMPT, 5))
    rig.until(lambda: rig.broker.finished == ["bad", "good"])
    assert rig.broker.texts["good"] == expected_output(PROMPT, 5)


def test_a_model_that_fails_again_and_again_ends_the_worker() -> None:
    rig = Rig()
    rig.model.fails_on_token = 511
    for index in range(5):
        rig.broker.put(request(f"r{index}", [511], 5))
        rig.until_ended(index + 1)
    rig.until(lambda: bool(rig.failures))
    rig.stop()
    assert rig.broker.given_back == ["r4"], "another worker may try the last one"
