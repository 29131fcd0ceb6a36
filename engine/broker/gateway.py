"""The API node's end of the broker: requests out, frames in, for thousands of streams at once.

One task runs every script (`Commands`), one reader per model waits for frames and hands them to
their streams, one task announces the node once a second, looks where its requests stand and sweeps.
A node that stops announcing itself is dead after `node_ms`, and workers stop its requests.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.patience import Patience
from engine.broker import scripts
from engine.broker.commands import Commands
from engine.broker.keys import MODELS, Keys
from engine.broker.positions import QueuePosition, QueueShape
from engine.broker.scripts import Argument
from engine.broker.settings import BrokerSettings
from engine.broker.stream import RequestStream
from engine.broker.wire import Wire
from engine.cost_model import DrainRate
from engine.errors import ModelUnavailable
from engine.messages import ControlMessage, GenerateRequest, Heartbeat, StepFrames, TokenFrame

logger = logging.getLogger(__name__)

LOOK_LIMIT = 500
"""Requests that one script looks at: about 2 ms of Redis."""
READ_LIMIT = 32
"""Messages handled before other tasks get their turn."""
READ_BLOCK_MS = 1_000
READ_RETRY_S = 0.2
CANCELLED_LIMIT = 10_000
CANCEL_AGAIN_S = 1.0
STOP_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the queue takes it."""

    request: GenerateRequest
    arguments: tuple[Argument, ...]
    """Of the script."""


class _Link:
    """What a node keeps of one model."""

    __slots__ = (
        "born",
        "keys",
        "last_id",
        "places",
        "rate",
        "read_since",
        "reader",
        "refreshed",
        "shape",
        "streams",
        "wiped_at",
    )

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.streams: dict[str, RequestStream] = {}
        self.reader: asyncio.Task[None] | None = None
        self.last_id = "0-0"
        self.read_since = 0.0
        """Loop time at which the last read began before which everything had been read."""
        self.born = b""
        self.wiped_at: float | None = None
        self.shape = QueueShape((), 0)
        self.places: dict[str, int] = {}
        self.rate = DrainRate()
        self.refreshed = 0.0


class GatewayBroker:
    """Requests of one API node to the workers of all models, and the streams of their tokens.

    `redis` must answer in bytes (`decode_responses=False`); it is used by one connection for all
    scripts and one per model for reading.
    """

    def __init__(self, redis: Redis, node: str, *, settings: BrokerSettings) -> None:
        assert not redis.connection_pool.connection_kwargs.get("decode_responses")
        self.node = node
        self._redis = redis
        self._settings = settings
        self._commands = Commands(redis, settings)
        self._links: dict[str, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self._heartbeats: dict[str | None, tuple[float, list[Heartbeat]]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepFrames)
        self._heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)

    async def start(self) -> None:
        """Start the tasks. Redis need not be reachable yet."""
        self._spawn(self._commands.run())
        self._spawn(self._keep_announcing())

    async def stop(self) -> None:
        """Say goodbye, so that workers stop this node's requests now, and end every stream.

        Stopping again changes nothing.
        """
        if not self._tasks:
            return
        goodbyes = [
            self._commands.call(scripts.LEAVE, link.keys.prefix, self.node)
            for link in self._links.values()
        ]
        if goodbyes:
            await asyncio.wait(goodbyes, timeout=1.0)
        # NOTE: again and again, because one cancellation can get lost: redis-py shakes hands with
        # `asyncio.wait_for`, which swallows one that comes just as a sending is done (Python 3.11).
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=STOP_AGAIN_S)
        await asyncio.gather(*goodbyes, return_exceptions=True)
        for link in self._links.values():
            for stream in list(link.streams.values()):
                stream.fail("the gateway is stopping")
            link.streams.clear()

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return sum(len(link.streams) for link in self._links.values())

    # -- requests out

    def prepare(self, request: GenerateRequest) -> Submission:
        """All of a submission that can be done before the request is paid for."""
        assert request.node == self.node
        settings = self._settings
        arguments = (
            request.request_id,
            request.tenant,
            self.node,
            repr(request.key),
            repr(request.weight),
            repr(request.work_s),
            request.attempt,
            settings.request_ms,
            settings.node_ms,
            self._encoder.encode(request),
        )
        return Submission(request, arguments)

    async def submit(self, submission: Submission) -> RequestStream:
        """Put a request into the queue: from now on workers may take it.

        Raises ModelUnavailable where Redis does not answer or this node has too many streams open.
        """
        if self.num_streams >= self._settings.streams_limit:
            raise ModelUnavailable("this node serves too many streams", limit=self.num_streams)
        request = submission.request
        link = self._link(request.model)
        stream = RequestStream(request, cancel=self.cancel)
        link.streams[request.request_id] = stream
        try:
            await self._send(link, submission)
        except BaseException:
            await self._abandon(link, request)
            raise
        stream.is_queued = True
        return stream

    async def extend(self, request: GenerateRequest) -> None:
        """Tell the worker that runs the request, or will, how far its fence is by now.

        The message may get lost with its worker or with Redis: say it again where no token comes.
        """
        prefix = self._link(request.model).keys.prefix
        arguments = (request.request_id, request.authorized_tokens)
        await self._commands.call(scripts.EXTEND, prefix, *arguments)

    async def cancel(self, request: GenerateRequest) -> None:
        """Withdraw a request from the queue or from its worker; harmless at any time.

        A request whose worker cannot be reached now is cancelled when its next frame arrives.
        """
        link = self._link(request.model)
        link.streams.pop(request.request_id, None)
        link.places.pop(request.request_id, None)
        await self._cancel(link, request.request_id)

    async def end_choice(self, request: GenerateRequest, choice: int) -> None:
        """One choice has said enough; the others go on. None of its tokens are received any more.

        Raises ModelUnavailable where the worker cannot be told now: its tokens are dropped here.
        """
        link = self._link(request.model)
        if (stream := link.streams.get(request.request_id)) is not None:
            stream.end_choice(choice)
        arguments = (request.request_id, choice)
        await self._commands.call(scripts.END_CHOICE, link.keys.prefix, *arguments)

    async def tell(self, model: str, worker: str, message: ControlMessage) -> None:
        """Send an operator's message to one worker."""
        encoded = self._encoder.encode(message)
        await self._commands.call(scripts.TELL, self._link(model).keys.prefix, worker, encoded)

    # -- what is going on

    async def position(self, request: GenerateRequest) -> QueuePosition:
        """Where the request stands: at most a second old, one script a second for the whole node.

        A request that waits no more has position 0.
        """
        link = self._link(request.model)
        if request.request_id not in link.places and request.request_id in link.streams:
            await self._look(link, [request.request_id])
        place = link.places.get(request.request_id, -1)
        shape = link.shape
        if place < 0:
            return QueuePosition(0, shape.num_waiting, None, 0, shape.num_tenants)
        position = shape.position(place)
        eta_ms = link.rate.wait_ms(position)
        return QueuePosition(position, shape.num_waiting, eta_ms, place, shape.num_tenants)

    def end_of_line(self, model: str) -> QueuePosition:
        """The place of a request that a new tenant would send now: at most a second old."""
        link = self._link(model)
        shape = link.shape
        if not shape.num_waiting:
            return QueuePosition(0, 0, 0)
        position = shape.position(0)
        return QueuePosition(
            position, shape.num_waiting, link.rate.wait_ms(position), 0, shape.num_tenants
        )

    async def heartbeats(self, model: str | None) -> list[Heartbeat]:
        """Last words of every live worker of `model` (None: of all models)."""
        now = asyncio.get_running_loop().time()
        read_at, cached = self._heartbeats.get(model, (-1e9, []))
        if now - read_at < self._settings.heartbeat_cache_s:
            return cached
        models = [model] if model is not None else await self._models()
        answers = await asyncio.gather(
            *(
                self._commands.call(scripts.WORKERS, Keys(name).prefix, self._settings.worker_ms)
                for name in models
            )
        )
        found = [self._heartbeat_decoder.decode(word) for words in answers for word in words]
        self._heartbeats[model] = (now, found)
        return found

    async def _models(self) -> list[str]:
        try:
            names: Any = await self._redis.zrange(MODELS, 0, -1)
        except RedisError as error:
            raise ModelUnavailable("the queue does not answer") from error
        return [name.decode() for name in names]

    # -- inside

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the broker failed", exc_info=error)

    def _link(self, model: str) -> _Link:
        link = self._links.get(model)
        if link is None:
            link = self._links[model] = _Link(Keys(model))
            link.reader = self._spawn(self._keep_reading(link))
        return link

    async def _send(self, link: _Link, submission: Submission) -> None:
        await self._commands.call(scripts.SUBMIT, link.keys.prefix, *submission.arguments)

    async def _cancel(self, link: _Link, request_id: str) -> None:
        self._cancelled[request_id] = asyncio.get_running_loop().time()
        self._cancelled.move_to_end(request_id)
        if len(self._cancelled) > CANCELLED_LIMIT:
            self._cancelled.popitem(last=False)
        try:
            await self._commands.call(scripts.CANCEL, link.keys.prefix, request_id)
        except ModelUnavailable as error:
            logger.warning("could not cancel %s: %s", request_id, error.message)

    async def _abandon(self, link: _Link, request: GenerateRequest) -> None:
        """A submission that failed or was interrupted may have arrived all the same."""
        link.streams.pop(request.request_id, None)
        self._spawn(self._cancel(link, request.request_id))

    # -- frames in

    async def _keep_reading(self, link: _Link) -> None:
        wire = Wire(self._redis)
        try:
            await self._read_on(link, wire)
        finally:
            await wire.close()

    async def _read_on(self, link: _Link, wire: Wire) -> None:
        stream = link.keys.frames(self.node)
        asking = ("XREAD", "COUNT", READ_LIMIT, "BLOCK", READ_BLOCK_MS, "STREAMS", stream)
        patience = Patience(READ_BLOCK_MS / 1_000 + self._settings.patience_s)
        has_read_all = True
        while True:
            if has_read_all:
                link.read_since = asyncio.get_running_loop().time()
            try:
                with patience:
                    (answer,) = await wire.round_trip([(*asking, link.last_id)])
                if isinstance(answer, RedisError):
                    raise answer
            except (RedisError, OSError) as error:
                logger.warning("cannot read frames of %s: %s", link.keys.model, error)
                # A Redis that comes back empty may count from an earlier id; repeats are dropped.
                link.last_id = "0-0"
                await asyncio.sleep(READ_RETRY_S)
                continue
            has_read_all = True
            # The third version of the protocol answers with a map, the second with pairs.
            for _, messages in answer.items() if isinstance(answer, dict) else answer or ():
                has_read_all = len(messages) < READ_LIMIT
                for message_id, (_, message) in messages:
                    link.last_id = message_id.decode()
                    self._dispatch(link, message)
                await asyncio.sleep(0)

    def _dispatch(self, link: _Link, message: bytes) -> None:
        try:
            step = self._decoder.decode(message)
        except msgspec.MsgspecError as error:
            # Of another version of the platform, perhaps; the gap that it leaves is noticed.
            logger.error("cannot read a message of %s: %s", link.keys.model, error)
            return
        streams = link.streams
        for frame in step.frames:
            stream = streams.get(frame.request_id)
            if stream is None:
                self._cancel_unknown(link, frame)
            elif frame.error == "worker_lost" and not step.worker:
                if frame.attempt >= stream.request.attempt:
                    stream.note_attempt(frame.attempt)
                    self._recover(link, stream, "its server was lost")
            elif not stream.receive(frame, step.worker):
                self._recover(link, stream, "tokens were lost on their way")
            else:
                if stream.is_closed:
                    del streams[frame.request_id]
                link.places.pop(frame.request_id, None)

    def _cancel_unknown(self, link: _Link, frame: TokenFrame) -> None:
        """A worker runs what nobody here wants: a cancellation was lost, or this node was away."""
        if frame.finish_reason is not None:
            return
        now = asyncio.get_running_loop().time()
        if now - self._cancelled.get(frame.request_id, -CANCEL_AGAIN_S) >= CANCEL_AGAIN_S:
            self._spawn(self._cancel(link, frame.request_id))

    def _recover(self, link: _Link, stream: RequestStream, reason: str) -> None:
        """Let the request go on from another attempt, unless it has had as many as it may."""
        attempt = stream.request.attempt
        if attempt >= self._settings.max_attempts:
            stream.fail(f"{reason}, at attempt {attempt}")
            link.streams.pop(stream.request.request_id, None)
            return
        logger.warning("attempt %d of %s: %s", attempt, stream.request.request_id, reason)
        stream.restart()
        self._spawn(self._resubmit(link, stream))

    async def _resubmit(self, link: _Link, stream: RequestStream) -> None:
        try:
            await self._send(link, self.prepare(stream.request))
        except ModelUnavailable as error:
            stream.fail(error.message)
            link.streams.pop(stream.request.request_id, None)

    # -- once a second

    async def _keep_announcing(self) -> None:
        while True:
            links = list(self._links.values())
            rounds = await asyncio.gather(*map(self._tick, links), return_exceptions=True)
            for link, outcome in zip(links, rounds, strict=True):
                if isinstance(outcome, Exception):
                    logger.warning("cannot announce to %s: %s", link.keys.model, outcome)
            await asyncio.sleep(self._settings.announce_interval_s)

    async def _tick(self, link: _Link) -> None:
        settings, prefix = self._settings, link.keys.prefix
        born = await self._commands.call(
            scripts.ANNOUNCE, prefix, self.node, settings.node_ms, link.last_id
        )
        self._notice_wipe(link, born)
        await self._commands.call(
            scripts.SWEEP, prefix, settings.max_attempts, scripts.SWEEP_PAUSE_MS
        )
        ids = list(link.streams)
        for start in range(0, max(1, len(ids)), LOOK_LIMIT):
            await self._look(link, ids[start : start + LOOK_LIMIT])
        link.places = {key: place for key, place in link.places.items() if key in link.streams}

    def _notice_wipe(self, link: _Link, born: bytes) -> None:
        if link.born and link.born != born:
            logger.warning("redis lost everything about %s", link.keys.model)
            link.wiped_at = asyncio.get_running_loop().time()
            link.last_id = "0-0"
        link.born = born

    async def _look(self, link: _Link, ids: list[str]) -> None:
        answer = await self._commands.call(scripts.LOOK, link.keys.prefix, *ids)
        born, num_taken, num_tenants, lengths, places = answer
        now = asyncio.get_running_loop().time()
        self._notice_wipe(link, born)
        link.shape = QueueShape(lengths, num_tenants)
        link.rate.observe(num_taken, now)
        for request_id, state, place in zip(ids, places[::2], places[1::2], strict=True):
            stream = link.streams.get(request_id)
            if stream is None:
                continue
            if state == b"gone":
                self._notice_gone(link, stream, now)
            else:
                stream.gone_since = None
                link.places[request_id] = place

    def _notice_gone(self, link: _Link, stream: RequestStream, now: float) -> None:
        """Redis does not know a request that is open here.

        Its last frames may be under way; after a wipe its worker may be about to claim it again; or
        its submission has not arrived yet. Only when none of that can be is it lost.
        """
        if not stream.is_queued:
            return
        if stream.gone_since is None:
            stream.gone_since = now
            return
        grace_s = self._settings.announce_interval_s / 2
        if link.wiped_at is not None and now - link.wiped_at < self._settings.lease_ms / 1000:
            return
        if now - stream.gone_since >= grace_s and link.read_since > stream.gone_since:
            self._recover(link, stream, "the queue has lost it")
