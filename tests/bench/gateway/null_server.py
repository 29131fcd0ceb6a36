"""OpenAI's API without a model, for gateways that speak it to their engines, and for no gateway.

`python -m tests.bench.gateway.null_server PORT DIRECTORY RATE`. A bare asyncio protocol, so that it
costs less than what it is there to measure; the tokens are those of `null_engine`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

import uvloop

from tests.bench.gateway.words import Words, now_word

CHUNK = (
    'data: {"id":"chatcmpl-null","object":"chat.completion.chunk","created":1,"model":"null",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)
WHOLE = (
    '{"id":"chatcmpl-null","object":"chat.completion","created":1,"model":"null","choices":[{'
    '"index":0,"message":{"role":"assistant","content":"%s"},"logprobs":null,'
    '"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":%d,'
    '"total_tokens":%d}}'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class NullConnection(asyncio.Protocol):
    """One connection; requests one after another."""

    def __init__(self, words: Words, interval_s: float) -> None:
        self._words = words
        self._interval_s = interval_s
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # NOTE: a cast, because uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(body) < length:
            return
        self._buffer = body[length:]
        self._answer(json.loads(body[:length]) if length else {})

    def _answer(self, request: dict[str, Any]) -> None:
        assert self._transport is not None
        num_tokens = request.get("max_tokens") or request.get("max_completion_tokens") or 1
        if request.get("stream"):
            self._transport.write(STREAM_HEAD)
            self._emit(asyncio.get_running_loop().time(), 0, num_tokens)
            return
        text = self._words.texts[now_word()]
        body = (WHOLE % (text, num_tokens, num_tokens + 9)).encode()
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write((head % len(body)).encode() + body)

    def _emit(self, due_s: float, index: int, num_tokens: int) -> None:
        assert self._transport is not None
        role = "" if index else '"role":"assistant",'
        delta = f'{{{role}"content":"{self._words.texts[now_word()]}"}}'
        event = (CHUNK % (delta, "null")).encode()
        if index + 1 < num_tokens:
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            due_s += self._interval_s
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(due_s, self._emit, due_s, index + 1, num_tokens)
            return
        event += (CHUNK % ("{}", '"length"')).encode() + b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))


async def serve(port: int, words: Words, interval_s: float) -> None:
    """For ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: NullConnection(words, interval_s), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Words(Path(sys.argv[2])), 1 / float(sys.argv[3])))
