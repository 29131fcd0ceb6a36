"""The worker's end of the broker, used by its I/O thread: requests in, frames out.

`exchange_all` is one round trip per engine step, however many models the worker serves. Every method
raises BrokerUnreachable where Redis does not answer; everything may be repeated, so a worker keeps
what it runs and tries again. (Repeating a charge whose answer was lost counts it twice: virtual time,
never money.)
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.broker import scripts
from engine.broker.errors import BrokerUnreachable
from engine.broker.keys import MODELS, Keys
from engine.broker.scripts import Argument, Call, Script
from engine.broker.settings import BrokerSettings
from engine.broker.window import NO_ROOM, TakeRoom
from engine.broker.wire import BlockingWire
from engine.messages import ControlMessage, Extend, GenerateRequest, Heartbeat, StepFrames

Answer = TypeVar("Answer")

Lost = dict[str, int]
"""Requests that belong to another worker by now, with the attempt that was held here: stop that one
and say nothing of it. (The next attempt may be taken here again, at any time.)"""

CONTROL_LIMIT = 1_000
"""Control messages of one round trip."""
WAIT_S_MAX = 2.0
"""Longest blocking wait: well below the socket's timeout."""
TENANTS_LIMIT = 10_000
"""Tenants whose weight is remembered although nothing of theirs runs here."""


@dataclass(slots=True)
class _Held:
    request: GenerateRequest
    is_published: bool = False

    @property
    def attempt(self) -> int:
        return self.request.attempt


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one round trip brought."""

    requests: list[GenerateRequest] = field(default_factory=list)
    control: list[ControlMessage] = field(default_factory=list)
    lost: Lost = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a worker has to say about one model, and how many requests it would take."""

    frames_by_node: Mapping[str, StepFrames] = field(default_factory=dict)
    charges: Mapping[str, float] = field(default_factory=dict)
    finished: Sequence[str] = ()
    room: TakeRoom = NO_ROOM
    waiting: Iterable[str] = ()
    """The tenants for whom the spare part of the room is not."""


def exchange_all(spoken: "Sequence[tuple[WorkerBroker, Outgoing]]") -> list[Exchange]:
    """Publish, charge, finish, listen and take for several models: one round trip.

    All brokers must use the same connection.
    """
    if not spoken:
        return []
    calls = [broker.calls_of(outgoing) for broker, outgoing in spoken]
    answers = iter(spoken[0][0].run([call for some in calls for call in some]))
    return [
        broker.conclude(outgoing, list(islice(answers, len(some))))
        for (broker, outgoing), some in zip(spoken, calls, strict=True)
    ]


class WorkerBroker:
    """The requests that one worker holds, and the queue that it takes them from.

    `redis` must answer in bytes. For one thread, and for a second one that only ever calls `wait`.
    """

    def __init__(self, redis: Redis, worker: str, model: str, *, settings: BrokerSettings) -> None:
        assert not redis.connection_pool.connection_kwargs.get("decode_responses")
        self.worker = worker
        self.model = model
        self.has_queue = False
        """Whether something was queued at the last heartbeat."""
        self._redis = redis
        self._wire = BlockingWire(redis)
        self._settings = settings
        self._keys = Keys(model)
        self._held: dict[str, _Held] = {}
        self._weights: dict[str, float] = {}
        self._control: deque[bytes] = deque()
        self._born = b""
        self._encoder = msgspec.msgpack.Encoder()
        self._request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
        self._control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(
            ControlMessage
        )

    @property
    def held(self) -> list[str]:
        """Ids of the requests that this worker has taken and not finished."""
        return list(self._held)

    def take(
        self, max_requests: int, spare: int = 0, waiting: Iterable[str] = ()
    ) -> list[GenerateRequest]:
        """Requests to run next, the least-served tenants' first; they are leased to this worker.

        Then up to `spare` further ones, one each of tenants that had none taken now and are not
        among the `waiting`.
        """
        room = TakeRoom(max_requests, spare)
        return self.exchange(room=room, waiting=waiting).requests

    def wait(self, timeout_s: float, *, for_newcomers: bool = False) -> bool:
        """Sleep until there is something to take or to obey; False after `timeout_s` of nothing.

        With room only for tenants that have nothing here, sleep until such a one comes: what is queued
        of the others would wake this worker all the time.
        """
        wake = self._keys.newcomers if for_newcomers else self._keys.wake
        keys = [self._keys.control(self.worker), wake]
        try:
            found: Any = self._redis.blpop(keys, timeout=min(timeout_s, WAIT_S_MAX))
        except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError) as error:
            raise BrokerUnreachable("redis does not answer", worker=self.worker) from error
        if found is None:
            return False
        if found[0].decode() == keys[0]:
            self._control.append(found[1])
        return True

    def publish(self, frames_by_node: Mapping[str, StepFrames]) -> Lost:
        """Send one message per API node; what belongs to another worker by now."""
        return self.exchange(frames_by_node=frames_by_node).lost

    def control(self) -> list[ControlMessage]:
        """What others want of this worker."""
        return self.exchange().control

    def charge(self, seconds_by_tenant: Mapping[str, float]) -> None:
        """Machine seconds that tenants have used; a tenant's weight divides them."""
        self.exchange(charges=seconds_by_tenant)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Their last frames have left; forget them."""
        self.exchange(finished=request_ids)

    def exchange(
        self,
        *,
        frames_by_node: Mapping[str, StepFrames] | None = None,
        charges: Mapping[str, float] | None = None,
        finished: Iterable[str] = (),
        room: TakeRoom = NO_ROOM,
        waiting: Iterable[str] = (),
    ) -> Exchange:
        """Publish, charge, finish, listen and take for this model: one round trip."""
        outgoing = Outgoing(frames_by_node or {}, charges or {}, list(finished), room, waiting)
        return exchange_all([(self, outgoing)])[0]

    def calls_of(self, outgoing: Outgoing) -> list[Call]:
        """The scripts of one exchange, for `run`."""
        calls: list[Call] = []
        if outgoing.frames_by_node:
            calls.append(self._publish_call(outgoing.frames_by_node))
        if outgoing.charges:
            calls.append(self._charge_call(outgoing.charges))
        if done := self._done(outgoing):
            calls.append(self._call(scripts.FINISH, self.worker, *self._attempts(done)))
        calls.append(self._call(scripts.CONTROL, self.worker, CONTROL_LIMIT))
        room = outgoing.room
        if room.is_any:
            head = (self.worker, room.for_any, self._settings.lease_ms, room.for_others)
            calls.append(self._call(scripts.TAKE, *head, *outgoing.waiting))
        return calls

    def conclude(self, outgoing: Outgoing, answers: list[Any]) -> Exchange:
        """What the answers to `calls_of` bring."""
        done = self._done(outgoing)
        lost: Lost = {}
        if outgoing.frames_by_node:
            lost = self._note_published(outgoing.frames_by_node, answers[0])
        for request_id in done:
            del self._held[request_id]
        taken = self._note_taken(answers.pop()) if outgoing.room.is_any else []
        # NOTE: popped one by one, because the thread in `wait` may add one at any time.
        words = [self._control.popleft() for _ in range(len(self._control))] + answers.pop()
        control = [self._control_decoder.decode(word) for word in words]
        self._note_extensions(control)
        return Exchange(taken, control, lost)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The answers of scripts, of whichever models, in one round trip."""
        return self._guarded(lambda: self._execute(calls))

    def renew(self, request_ids: Iterable[str]) -> Lost:
        """Keep the leases of what runs; what this worker has lost and must stop."""
        ids = [request_id for request_id in request_ids if request_id in self._held]
        lease_ms = self._settings.lease_ms
        answer = self.run([self._call(scripts.RENEW, self.worker, lease_ms, *self._attempts(ids))])
        born, *lost = answer[0]
        if self._notice_wipe(born):
            return self._reclaim()
        return self._forget(lost)

    def heartbeat(self, heartbeat: Heartbeat) -> Lost:
        """Say that this worker is alive, and sweep after those that are not.

        Returns what it has lost, as `renew` does, where Redis turns out to have been wiped.
        """
        settings = self._settings
        word = self._encoder.encode(heartbeat)
        sweep = (settings.max_attempts, scripts.SWEEP_PAUSE_MS)
        (born, num_tenants), _ = self.run(
            [
                self._call(scripts.HEARTBEAT, self.worker, settings.worker_ms, word),
                self._call(scripts.SWEEP, *sweep),
            ]
        )
        self.has_queue = num_tenants > 0
        self._guarded(lambda: self._redis.zadd(MODELS, {self.model: heartbeat.sent_ms}))
        return self._reclaim() if self._notice_wipe(born) else {}

    def give_back(self, request_ids: Iterable[str]) -> None:
        """Return requests in good order; one that has published frames is lost to its API node."""
        ids = [request_id for request_id in request_ids if request_id in self._held]
        if ids:
            self.run([self._call(scripts.GIVE_BACK, self.worker, *self._attempts(ids))])
        for request_id in ids:
            del self._held[request_id]

    def dead_nodes(self, nodes: Iterable[str]) -> set[str]:
        """Those of `nodes` that have stopped announcing themselves."""
        call = self._call(scripts.DEAD_NODES, self._settings.node_ms, *nodes)
        return {node.decode() for node in self.run([call])[0]}

    def close(self) -> None:
        """Give the connection back; the next round trip takes another one."""
        self._wire.close()

    # -- inside

    def _call(self, script: Script, *arguments: Argument) -> Call:
        return Call(script, self._keys.prefix, arguments)

    def _attempts(self, ids: Iterable[str]) -> list[Argument]:
        return [part for key in ids for part in (key, self._held[key].attempt)]

    def _publish_call(self, frames_by_node: Mapping[str, StepFrames]) -> Call:
        first = [key for key, held in self._spoken(frames_by_node) if not held.is_published]
        messages: list[Argument] = []
        for node, step in frames_by_node.items():
            messages += (node, self._encoder.encode(step))
        head = (self.worker, self._born, len(first))
        return self._call(scripts.PUBLISH, *head, *self._attempts(first), *messages)

    def _note_published(
        self, frames_by_node: Mapping[str, StepFrames], refused: Sequence[bytes]
    ) -> Lost:
        """Repeat without the requests that were refused, if any were; remember what has left."""
        if not refused:
            for _, held in self._spoken(frames_by_node):
                held.is_published = True
            return {}
        lost = self._forget(refused)
        kept = {node: _without(step, lost) for node, step in frames_by_node.items()}
        kept = {node: step for node, step in kept.items() if step.frames}
        if kept:
            answer = self.run([self._publish_call(kept)])[0]
            lost |= self._note_published(kept, answer)
        return lost

    def _spoken(self, frames_by_node: Mapping[str, StepFrames]) -> list[tuple[str, _Held]]:
        """The held attempts that these frames are of."""
        spoken = {
            (frame.request_id, frame.attempt)
            for step in frames_by_node.values()
            for frame in step.frames
        }
        found = ((key, attempt, self._held.get(key)) for key, attempt in spoken)
        return [(key, held) for key, attempt, held in found if held and held.attempt == attempt]

    def _charge_call(self, seconds_by_tenant: Mapping[str, float]) -> Call:
        arguments: list[Argument] = []
        for tenant, seconds in seconds_by_tenant.items():
            arguments += (tenant, repr(seconds / self._weights.get(tenant, 1.0)))
        return self._call(scripts.CHARGE, *arguments)

    def _note_taken(self, answer: Sequence[bytes]) -> list[GenerateRequest]:
        requests = []
        for body, attempt, fence in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
            request = self._request_decoder.decode(body)
            authorized = int(fence or request.authorized_tokens)
            if (request.attempt, request.authorized_tokens) != (int(attempt), authorized):
                request = msgspec.structs.replace(
                    request, attempt=int(attempt), authorized_tokens=authorized
                )
            self._held[request.request_id] = _Held(request)
            self._weights[request.tenant] = request.weight
            requests.append(request)
        if len(self._weights) > TENANTS_LIMIT:
            tenants = {held.request.tenant for held in self._held.values()}
            self._weights = {key: self._weights[key] for key in tenants}
        return requests

    def _note_extensions(self, control: Iterable[ControlMessage]) -> None:
        """What is announced again after a wipe has the fence that it has here."""
        for message in control:
            if not isinstance(message, Extend):
                continue
            if (held := self._held.get(message.request_id)) is not None:
                held.request = msgspec.structs.replace(
                    held.request, authorized_tokens=message.authorized_tokens
                )

    def _notice_wipe(self, born: bytes) -> bool:
        was_wiped = bool(self._born) and self._born != born
        self._born = born
        return was_wiped

    def _reclaim(self) -> Lost:
        """Redis forgot everything: announce again what runs here."""
        arguments: list[Argument] = []
        for key, held in self._held.items():
            request = held.request
            body = b"" if held.is_published else self._encoder.encode(request)
            arguments += (key, request.attempt, request.tenant, request.node)
            arguments += (repr(request.key), repr(request.weight), repr(request.work_s), body)
        if not arguments:
            return {}
        head = (self.worker, self._settings.lease_ms, self._settings.request_ms)
        return self._forget(self.run([self._call(scripts.RECLAIM, *head, *arguments)])[0])

    def _forget(self, ids: Iterable[bytes]) -> Lost:
        return {key.decode(): self._held.pop(key.decode()).attempt for key in ids}

    def _done(self, outgoing: Outgoing) -> list[str]:
        return [request_id for request_id in outgoing.finished if request_id in self._held]

    def _guarded(self, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError) as error:
            raise BrokerUnreachable("redis does not answer", worker=self.worker) from error

    def _execute(self, calls: Sequence[Call]) -> list[Any]:
        answers = self._round_trip([call.command for call in calls])
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            sources = {calls[i].script.source for i in unknown}
            self._round_trip([("SCRIPT LOAD", source) for source in sorted(sources)])
            repeated = self._round_trip([calls[i].command for i in unknown])
            for i, answer in zip(unknown, repeated, strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    def _round_trip(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        answers = self._wire.round_trip(commands)
        for answer in answers:
            if isinstance(answer, (RedisConnectionError, RedisTimeoutError, ReadOnlyError)):
                raise answer
        return answers


def _without(step: StepFrames, lost: Lost) -> StepFrames:
    frames = [frame for frame in step.frames if frame.attempt > lost.get(frame.request_id, 0)]
    return msgspec.structs.replace(step, frames=frames)
