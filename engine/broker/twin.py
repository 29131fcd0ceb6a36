"""The state machine of the Lua scripts in memory: for the simulator, and as their oracle in tests.

One method per script, with the same outcome in every case, ties included. Nothing expires by itself:
`sweep` compares deadlines with the clock that the twin is given.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from engine.broker.score_heap import ScoreHeap
from engine.broker.settings import BrokerSettings

State = Literal["queued", "taken"]

LostReason = Literal["worker_lost", "too_many_attempts"]


@dataclass(slots=True)
class TwinRequest:
    """One request and its state."""

    request_id: str
    tenant: str
    node: str
    key: float
    weight: float = 1.0
    work_s: float = 0.0
    attempt: int = 1
    state: State = "queued"
    worker: str | None = None
    is_published: bool = False
    is_cancelled: bool = False
    authorized: int | None = None
    """The fence, where it differs from what it was submitted with."""
    is_orphaned: bool = False
    """Its API node died and its worker was told: another death of that node concerns it no more."""

    @property
    def advance(self) -> float:
        """Virtual seconds charged while a worker holds it."""
        return self.work_s / self.weight


@dataclass(frozen=True, slots=True)
class LostRequest:
    """What an API node is told of a request that no worker will finish."""

    node: str
    request_id: str
    attempt: int
    reason: LostReason


class BrokerTwin:
    """The queue of one model, shared fairly by its tenants."""

    def __init__(self, settings: BrokerSettings, now_ms: Callable[[], float]) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self.requests: dict[str, TwinRequest] = {}
        self.tenants = ScoreHeap()
        self.idle = ScoreHeap()
        self.queues: dict[str, ScoreHeap] = defaultdict(ScoreHeap)
        self.leases = ScoreHeap()
        self.nodes = ScoreHeap()
        self.last_tenant: str | None = None
        self.num_taken = 0
        self.cancels: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """Worker → (request, attempt) that it should stop, in order."""
        self.extensions: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """Worker → (request, fence) that it was told, in order."""
        self.ended_choices: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """Worker → (request, choice) that has said enough, in order."""
        self.lost: list[LostRequest] = []

    # -- of the API node

    def submit(self, request: TwinRequest) -> bool:
        """A request enters the queue; False where it was there already."""
        known = self.requests.get(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return False
            if known.worker is not None:
                self._tell_cancel(known)
            self._drop(known)
        self.requests[request.request_id] = request
        if self.nodes.score(request.node) is None:
            self.nodes.add(request.node, self._now_ms() + self._settings.node_ms)
        self._enqueue(request)
        return True

    def extend(self, request_id: str, authorized: int) -> bool:
        """More output is paid for; False where nobody knows the request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.authorized = authorized
        if request.state == "taken":
            assert request.worker is not None
            self.extensions[request.worker].append((request_id, authorized))
        return True

    def cancel(self, request_id: str) -> bool:
        """Nobody wants it any more; False where nobody knows the request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.state != "taken":
            self._drop(request)
        elif not request.is_cancelled:
            self._tell_cancel(request)
        return True

    def end_choice(self, request_id: str, choice: int) -> bool:
        """One choice has said enough; False where no worker runs the request."""
        request = self.requests.get(request_id)
        if request is None or request.state != "taken":
            return False
        assert request.worker is not None
        self.ended_choices[request.worker].append((request_id, choice))
        return True

    def announce(self, node: str) -> None:
        """An API node is alive."""
        self.nodes.add(node, self._now_ms() + self._settings.node_ms)

    def leave(self, node: str) -> None:
        """An API node says goodbye."""
        if self.nodes.score(node) is not None:
            self.nodes.add(node, 0.0)

    # -- of the worker

    def take(
        self, worker: str, max_requests: int, spare: int = 0, waiting: Iterable[str] = ()
    ) -> list[TwinRequest]:
        """The least-served tenant's least key, again and again.

        Then up to `spare` further ones, one each of tenants that had none taken now and are not
        among the `waiting`.
        """
        deadline = self._now_ms() + self._settings.lease_ms
        passed_over = set(waiting)
        taken: list[TwinRequest] = []
        while len(taken) < max_requests + spare:
            passed = passed_over if len(taken) >= max_requests else frozenset[str]()
            tenant = self.tenants.first_except(passed)
            if tenant is None:
                break
            passed_over.add(tenant)
            _, request_id = self.queues[tenant].pop_first()
            request = self.requests[request_id]
            request.state, request.worker = "taken", worker
            self.leases.add(request_id, deadline)
            self.charge(tenant, request.advance)
            taken.append(request)
            self._deactivate_if_empty(tenant)
        self.num_taken += len(taken)
        return taken

    def publish_first(self, worker: str, firsts: Iterable[tuple[str, int]]) -> list[str]:
        """Mark first frames as sent; the requests that the worker has lost, and then marks none."""
        owned = {key: self._owned(worker, key, attempt) for key, attempt in firsts}
        lost = [key for key, request in owned.items() if request is None]
        if not lost:
            for request in owned.values():
                assert request is not None
                request.is_published = True
        return lost

    def renew(self, worker: str, held: Iterable[tuple[str, int]]) -> list[str]:
        """Keep leases; the requests that the worker has lost."""
        deadline = self._now_ms() + self._settings.lease_ms
        lost = []
        for request_id, attempt in held:
            if self._owned(worker, request_id, attempt) is None:
                lost.append(request_id)
            else:
                self.leases.add(request_id, deadline)
        return lost

    def charge(self, tenant: str, virtual_seconds: float) -> None:
        """Machine time over weight that a tenant has used."""
        if virtual_seconds == 0:
            return
        listed = self.idle if self.tenants.score(tenant) is None else self.tenants
        listed.add(tenant, (listed.score(tenant) or 0.0) + virtual_seconds)

    def finish(self, worker: str, held: Iterable[tuple[str, int]]) -> None:
        """All their frames have left."""
        for request_id, attempt in held:
            request = self._owned(worker, request_id, attempt)
            if request is not None:
                self._drop(request)

    def give_back(self, worker: str, held: Iterable[tuple[str, int]]) -> None:
        """A worker that drains returns requests in good order."""
        for request_id, attempt in held:
            request = self._owned(worker, request_id, attempt)
            if request is not None:
                self._lose(request, penalty=0, max_attempts=None)

    # -- of both

    def sweep(self) -> None:
        """Clean up after whoever died, as far as deadlines tell."""
        now = self._now_ms()
        for request_id in self.leases.up_to(now):
            self._lose(
                self.requests[request_id], penalty=1, max_attempts=self._settings.max_attempts
            )
        for node in self.nodes.up_to(now):
            self._forget_node(node)
        least = self._least_virtual()
        if least is not None:
            for tenant in self.idle.below(least):
                self.idle.remove(tenant)

    # -- inside

    def _owned(self, worker: str, request_id: str, attempt: int) -> TwinRequest | None:
        request = self.requests.get(request_id)
        if request is None or request.worker != worker or request.attempt != attempt:
            return None
        return request

    def _least_virtual(self) -> float | None:
        if self.tenants:
            return self.tenants.first()[0]
        return None if self.last_tenant is None else self.idle.score(self.last_tenant)

    def _enqueue(self, request: TwinRequest) -> None:
        self.queues[request.tenant].add(request.request_id, request.key)
        tenant = request.tenant
        if self.tenants.score(tenant) is None:
            own, least = self.idle.score(tenant) or 0.0, self._least_virtual() or 0.0
            self.tenants.add(tenant, max(own, least))
            self.idle.remove(tenant)

    def _deactivate_if_empty(self, tenant: str) -> None:
        virtual = self.tenants.score(tenant)
        if self.queues[tenant] or virtual is None:
            return
        del self.queues[tenant]
        self.tenants.remove(tenant)
        self.idle.add(tenant, virtual)
        self.last_tenant = tenant

    def _release(self, request: TwinRequest) -> None:
        self.leases.remove(request.request_id)
        self.charge(request.tenant, -request.advance)

    def _drop(self, request: TwinRequest) -> None:
        if request.state == "queued":
            self.queues[request.tenant].remove(request.request_id)
            self._deactivate_if_empty(request.tenant)
        else:
            self._release(request)
        del self.requests[request.request_id]

    def _tell_cancel(self, request: TwinRequest) -> None:
        assert request.worker is not None
        request.is_cancelled = True
        self.cancels[request.worker].append((request.request_id, request.attempt))

    def _lose(self, request: TwinRequest, *, penalty: int, max_attempts: int | None) -> None:
        if request.is_cancelled:
            self._drop(request)
        elif request.is_published:
            self._tell_lost(request, "worker_lost")
        elif max_attempts is not None and request.attempt + penalty > max_attempts:
            self._tell_lost(request, "too_many_attempts")
        else:
            self._release(request)
            request.state, request.worker = "queued", None
            request.attempt += penalty
            self._enqueue(request)

    def _tell_lost(self, request: TwinRequest, reason: LostReason) -> None:
        lost = LostRequest(request.node, request.request_id, request.attempt, reason)
        self.lost.append(lost)
        self._drop(request)

    def _forget_node(self, node: str) -> None:
        own = [each for each in self.requests.values() if each.node == node]
        for request in sorted(own, key=lambda request: request.request_id):
            if request.is_orphaned:
                continue
            if request.state == "taken":
                request.is_orphaned = True
                self._tell_cancel(request)
            else:
                self._drop(request)
        self.nodes.remove(node)
