"""The Lua scripts against their in-memory twin: any sequence of events leaves both in one state.

Few tenants, equal keys and workers that die are the normal case here. Time does not pass by itself:
a rule lets one deadline pass in both.
"""

from typing import Any

import msgspec
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engine.broker import scripts
from engine.broker.keys import Keys
from engine.broker.scripts import Argument, Script
from engine.broker.settings import BrokerSettings
from engine.broker.twin import BrokerTwin, LostRequest, TwinRequest
from engine.messages import Cancel, ControlMessage, EndChoice, Extend, StepFrames

AGES = 10**9
SETTINGS = BrokerSettings(lease_ms=AGES, node_ms=AGES, request_ms=AGES)
IDS = st.sampled_from([f"r{i}" for i in range(8)])
TENANTS = st.sampled_from(["a", "b", "c"])
WORKERS = st.sampled_from(["w1", "w2"])
NODES = st.sampled_from(["n1", "n2"])
FENCES = st.integers(1, 1000)
SECONDS = st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.3])


class TwinMachine(RuleBasedStateMachine):
    """Every rule does the same to Redis and to the twin."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushdb()
        self.keys = Keys("m")
        self.now = 1_000.0
        self.twin = BrokerTwin(SETTINGS, lambda: self.now)
        self.told: dict[str, list[tuple[str, int]]] = {}

    def run_script(self, script: Script, *arguments: Argument) -> Any:
        return self.client.eval(script.source, 1, self.keys.prefix, *arguments)

    def attempt_of(self, request_id: str) -> int:
        request = self.twin.requests.get(request_id)
        return 1 if request is None else request.attempt

    # -- rules

    @rule(
        request_id=IDS,
        tenant=TENANTS,
        node=NODES,
        key=st.sampled_from([0.0, 0.25, 1e9 + 0.1]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        work_s=SECONDS,
        is_again=st.booleans(),
    )
    def submit(
        self,
        request_id: str,
        tenant: str,
        node: str,
        key: float,
        weight: float,
        work_s: float,
        is_again: bool,
    ) -> None:
        attempt = self.attempt_of(request_id) + is_again
        request = TwinRequest(request_id, tenant, node, key, weight, work_s, attempt)
        answer = self.run_script(
            scripts.SUBMIT,
            request_id,
            tenant,
            node,
            repr(key),
            repr(weight),
            repr(work_s),
            attempt,
            *(AGES, AGES),
            f"body of {request_id}",
        )
        assert bool(answer) == self.twin.submit(request)

    @rule(request_id=IDS, authorized=FENCES)
    def extend(self, request_id: str, authorized: int) -> None:
        answer = self.run_script(scripts.EXTEND, request_id, authorized)
        assert bool(answer) == self.twin.extend(request_id, authorized)

    @rule(request_id=IDS)
    def cancel(self, request_id: str) -> None:
        answer = self.run_script(scripts.CANCEL, request_id)
        assert bool(answer) == self.twin.cancel(request_id)

    @rule(request_id=IDS, choice=st.integers(0, 2))
    def end_choice(self, request_id: str, choice: int) -> None:
        answer = self.run_script(scripts.END_CHOICE, request_id, choice)
        assert bool(answer) == self.twin.end_choice(request_id, choice)

    @rule(
        worker=WORKERS,
        count=st.integers(0, 5),
        spare=st.integers(0, 2),
        waiting=st.lists(TENANTS, unique=True, max_size=2),
    )
    def take(self, worker: str, count: int, spare: int, waiting: list[str]) -> None:
        answer = self.run_script(scripts.TAKE, worker, count, AGES, spare, *waiting)
        taken = self.twin.take(worker, count, spare, waiting)
        bodies = [word.decode().removeprefix("body of ") for word in answer[::3]]
        assert bodies == [request.request_id for request in taken]
        assert [int(word) for word in answer[1::3]] == [request.attempt for request in taken]
        fences = [int(word) if word else None for word in answer[2::3]]
        assert fences == [request.authorized for request in taken]

    @rule(worker=WORKERS, ids=st.lists(IDS, unique=True, min_size=1, max_size=3))
    def publish(self, worker: str, ids: list[str]) -> None:
        pairs = [(request_id, self.attempt_of(request_id)) for request_id in ids]
        flat = [part for pair in pairs for part in pair]
        born = self.client.get(self.keys.born) or b""
        answer = self.run_script(scripts.PUBLISH, worker, born, len(pairs), *flat)
        if not born:
            return  # Redis was never used: it looks like a wipe, and nothing is held anyway
        assert {word.decode() for word in answer} == set(self.twin.publish_first(worker, pairs))

    @rule(worker=WORKERS, ids=st.lists(IDS, unique=True, max_size=3), is_stale=st.booleans())
    def renew(self, worker: str, ids: list[str], is_stale: bool) -> None:
        pairs = [(request_id, self.attempt_of(request_id) - is_stale) for request_id in ids]
        flat = [part for pair in pairs for part in pair]
        _, *lost = self.run_script(scripts.RENEW, worker, AGES, *flat)
        assert [word.decode() for word in lost] == self.twin.renew(worker, pairs)

    @rule(tenant=TENANTS, seconds=SECONDS)
    def charge(self, tenant: str, seconds: float) -> None:
        self.run_script(scripts.CHARGE, tenant, repr(seconds))
        self.twin.charge(tenant, seconds)

    @rule(worker=WORKERS, request_id=IDS, is_draining=st.booleans())
    def let_go(self, worker: str, request_id: str, is_draining: bool) -> None:
        pair = (request_id, self.attempt_of(request_id))
        if is_draining:
            self.run_script(scripts.GIVE_BACK, worker, *pair)
            self.twin.give_back(worker, [pair])
        else:
            self.run_script(scripts.FINISH, worker, *pair)
            self.twin.finish(worker, [pair])

    @rule(request_id=IDS)
    def let_a_deadline_pass(self, request_id: str) -> None:
        if self.twin.leases.score(request_id) is not None:
            self.twin.leases.add(request_id, 0.0)
            self.client.zadd(self.keys.prefix + "lease", {request_id: 0.0})

    @rule(node=NODES)
    def kill_a_node(self, node: str) -> None:
        self.run_script(scripts.LEAVE, node)
        self.twin.leave(node)

    @rule(node=NODES)
    def announce(self, node: str) -> None:
        self.run_script(scripts.ANNOUNCE, node, AGES, "")
        self.twin.announce(node)

    @rule()
    def sweep(self) -> None:
        self.client.delete(self.keys.prefix + "swept")
        self.run_script(scripts.SWEEP, SETTINGS.max_attempts, 1)
        self.twin.sweep()

    # -- what must be equal

    @invariant()
    def scores_are_equal(self) -> None:
        twin, prefix = self.twin, self.keys.prefix
        assert self.scores("tenants") == twin.tenants.items()
        assert self.scores("idle") == twin.idle.items()
        for tenant in ("a", "b", "c"):
            queue = twin.queues[tenant].items() if tenant in twin.queues else {}
            assert self.scores(f"q:{tenant}") == queue
        for name, heap in (("lease", twin.leases), ("nodes", twin.nodes)):
            assert self.scores(name).keys() == heap.items().keys()
        assert int(self.client.get(prefix + "taken") or 0) == twin.num_taken

    @invariant()
    def requests_are_equal(self) -> None:
        names = [key.decode().rpartition(":r:")[2] for key in self.client.keys("*:r:*")]
        assert set(names) == set(self.twin.requests)
        by_node: dict[str, set[str]] = {"n1": set(), "n2": set()}
        for request_id, twin in self.twin.requests.items():
            found = self.client.hgetall(self.keys.request(request_id))
            assert found[b"state"].decode() == twin.state
            assert int(found[b"attempt"]) == twin.attempt
            assert (found.get(b"worker") or b"").decode() == (twin.worker or "")
            assert (b"body" not in found) == twin.is_published
            assert (b"cancelled" in found) == twin.is_cancelled
            by_node[twin.node].add(request_id)
        for node, ids in by_node.items():
            members = {
                word.decode() for word in self.client.smembers(f"{self.keys.prefix}node:{node}")
            }
            # A dead node's running requests are left to their worker, which is told to stop.
            assert members == {key for key in ids if not self.twin.requests[key].is_orphaned}

    @invariant()
    def messages_are_equal(self) -> None:
        for worker in ("w1", "w2"):
            words = self.client.lrange(self.keys.control(worker), 0, -1)
            told = [msgspec.msgpack.decode(word, type=ControlMessage) for word in words]
            cancels = [(one.request_id, one.attempt) for one in told if isinstance(one, Cancel)]
            assert cancels == self.twin.cancels[worker]
            fences = [
                (one.request_id, one.authorized_tokens) for one in told if isinstance(one, Extend)
            ]
            assert fences == self.twin.extensions[worker]
            choices = [(one.request_id, one.choice) for one in told if isinstance(one, EndChoice)]
            assert choices == self.twin.ended_choices[worker]
        for node in ("n1", "n2"):
            sent = {(lost.request_id, lost.attempt, lost.reason) for lost in self.lost_of(node)}
            expected = {
                (o.request_id, o.attempt, o.reason) for o in self.twin.lost if o.node == node
            }
            # The stream of a node that was swept away went with it.
            assert sent <= expected

    @invariant()
    def a_worker_is_woken_while_there_is_something_to_take(self) -> None:
        assert (self.client.llen(self.keys.wake) > 0) >= bool(self.twin.tenants)

    def scores(self, name: str) -> dict[str, float]:
        pairs = self.client.zrange(self.keys.prefix + name, 0, -1, withscores=True)
        return {member.decode(): score for member, score in pairs}

    def lost_of(self, node: str) -> list[LostRequest]:
        found = []
        for _, fields in self.client.xrange(self.keys.frames(node)):
            step = msgspec.msgpack.decode(fields[b"d"], type=StepFrames)
            for frame in step.frames:
                assert frame.error in ("worker_lost", "too_many_attempts")
                found.append(LostRequest(node, frame.request_id, frame.attempt, frame.error))
        return found


def test_the_scripts_and_their_twin_never_disagree(client: redis.Redis) -> None:
    class OnThisRedis(TwinMachine):
        pass

    OnThisRedis.client = client
    run_state_machine_as_test(
        OnThisRedis,
        settings=settings(
            max_examples=35,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
