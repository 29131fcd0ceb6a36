"""The load generator: bare asyncio connections that note when each frame came.

An HTTP library would cost more than the servers under test and become what is measured.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from tests.bench.gateway.words import Words, clock_ms

CONTENT = re.compile(rb'"content": ?"([ A-Za-z0-9]+)"')
END_OF_STREAM = b"[DONE]"
LAST_CHUNK = b"0\r\n\r\n"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they carry."""

    origin: str
    model: str
    headers: dict[str, str]
    path: str = "/v1/chat/completions"

    def request(self, *, stream: bool, max_tokens: int, content: str = "Tell the time.") -> bytes:
        """The bytes of one request."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
        }
        if stream:
            body["stream"] = True
        encoded = json.dumps(body).encode()
        lines = [f"POST {self.path} HTTP/1.1", f"host: {urlsplit(self.origin).netloc}"]
        lines += ["content-type: application/json", f"content-length: {len(encoded)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + encoded


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times in milliseconds of the shared clock."""

    is_streamed: bool
    due_ms: float
    """When it should have been sent: a generator that is late must not flatter the server."""
    first_ms: float = 0.0
    last_ms: float = 0.0
    num_frames: int = 0
    status: int = 0
    delays_ms: list[float] = field(default_factory=list)
    frames_ms: list[float] = field(default_factory=list)
    """When each frame came."""

    @property
    def ttft_ms(self) -> float:
        """Until the first content, or the whole answer."""
        return self.first_ms - self.due_ms


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._buffer = b""
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # NOTE: a cast, because uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._buffer += data
        if not exchange.status:
            if b"\r\n\r\n" not in self._buffer:
                return
            exchange.status = int(self._buffer[9:12])
        if exchange.is_streamed and exchange.status == 200:
            self._read_events(exchange)
        else:
            self._read_whole(exchange)

    def _read_events(self, exchange: Exchange) -> None:
        complete, found, rest = self._buffer.rpartition(b"\n\n")
        self._buffer = rest
        if not found:
            self._end_behind_last_chunk(exchange)
            return
        now_ms = clock_ms()
        for word in CONTENT.findall(complete):
            exchange.num_frames += 1
            exchange.first_ms = exchange.first_ms or now_ms
            exchange.delays_ms.append(self._words.delay_ms(word, now_ms))
            exchange.frames_ms.append(now_ms)
        if END_OF_STREAM in complete:
            exchange.last_ms = now_ms
        self._end_behind_last_chunk(exchange)

    def _end_behind_last_chunk(self, exchange: Exchange) -> None:
        """The next request may follow only when nothing of this answer is still to come."""
        if exchange.last_ms and self._buffer.endswith(LAST_CHUNK):
            self._end()

    def _read_whole(self, exchange: Exchange) -> None:
        head, _, body = self._buffer.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: *(\d+)", head)
        is_complete = len(body) >= int(found[1]) if found else body.endswith(LAST_CHUNK)
        if is_complete:
            exchange.first_ms = exchange.last_ms = clock_ms()
            exchange.num_frames = len(CONTENT.findall(body))
            self._end()

    def _end(self) -> None:
        self._exchange, self._buffer = None, b""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def send(self, request: bytes, exchange: Exchange) -> Exchange:
        """Send and wait for the end of the answer, or of the connection."""
        assert self._transport is not None
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            await self._ended
        return exchange

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


class Pool:
    """Connections to one target, kept while they are idle."""

    def __init__(self, target: Target, words: Words) -> None:
        self._target = target
        self._words = words
        self._idle: list[Connection] = []

    async def ask(
        self, *, stream: bool, max_tokens: int = 1, due_ms: float = 0.0, content: str = ""
    ) -> Exchange:
        """One exchange on an idle connection, or a new one."""
        exchange = Exchange(stream, due_ms or clock_ms())
        connection = await self._connection()
        content = content or "Tell the time."
        request = self._target.request(stream=stream, max_tokens=max_tokens, content=content)
        await connection.send(request, exchange)
        if connection.is_open:
            self._idle.append(connection)
        return exchange

    def close(self) -> None:
        """Hang up all."""
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            if (known := self._idle.pop()).is_open:
                return known
        address = urlsplit(self._target.origin)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._words), address.hostname, address.port
        )
        return connection
