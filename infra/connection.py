"""One HTTP connection: uvicorn's, with bounds on what comes before anybody is known.

httptools collects a request's head without a limit: one client without a key made the process keep
200 MB of a single header. Nor has uvicorn a limit of time: a head that never ends kept its descriptor.
"""

import asyncio
import re
from collections import deque
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.middleware import DIRECT_BODY
from infra.direct_body import ChunkedBody

HEAD_BYTES_MAX = 65_536
"""Of a head, beyond the piece that it begins in; of trailers, too."""
HEAD_TIMEOUT_S = 30.0
"""From the connection, or the first byte of a later request, to the end of the head."""
OFFER = re.compile(rb"(?i)(?<=\r\n)upgrade(?=:[ \t]*h2c[ \t]*\r\n)")
"""Java's client offers HTTP/2 with every request that is not encrypted. The offer may be ignored, but
the parser leaves off behind such a head, and the body would be lost."""
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 29\r\n\r\n"
    b"The request's head is too big"
)


class Connection(HttpToolsProtocol):
    """Refuses a head that is too long, and closes on a client that does not finish one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Oldest first. uvicorn remembers the newest, and would tell only that one of a hang-up."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """The first head is due."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more, and nobody listens to what is being answered."""
        self._forget_head()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to no body; the parser's callbacks below begin the count anew."""
        self._num_head_bytes += len(data)
        if self._is_idle and b"h2c" in data:
            data = _without_offer(data)
        super().data_received(data)
        if self._num_head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            if self._is_idle:
                self.transport.write(TOO_LARGE)
            self.transport.close()
        elif self._is_idle and self._deadline is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """It has ended."""
        self._num_head_bytes = 0
        self._forget_head()
        previous = self.cycle
        super().on_headers_complete()
        if self.cycle is not previous:
            self._unanswered.append(self.cycle)
        if self.scope["method"] != "HEAD":
            # Its task, which has just been made, has not begun.
            scope = cast(dict[str, Any], self.scope)
            scope[DIRECT_BODY] = ChunkedBody(self.cycle, self.flow, self.transport)

    def on_body(self, body: bytes) -> None:
        """What the application bounds."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The oldest request is answered; the next one may begin."""
        self._unanswered.popleft()
        super().on_response_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._end_waiting)

    def _forget_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_waiting(self) -> None:
        self._deadline = None
        if self._is_idle:
            self.transport.close()


def _without_offer(data: bytes) -> bytes:
    """The same, where the head asks for no other protocol."""
    head, end, body = data.partition(b"\r\n\r\n")
    return OFFER.sub(b"ignored", head + end[:2]) + end[2:] + body
