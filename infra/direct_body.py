"""Past ASGI: a piece of a streamed body goes to the transport as one write.

By ASGI it would be a message in a dictionary, looked at by a coroutine that waits for nothing: a
tenth of what a streamed token costs. What is particular, the head, the end, a client that does not
read, is left to uvicorn.
"""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ChunkedBody:
    """The body of one answer, while it is chunked; an `api.streaming.DirectBody`."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(
        self, cycle: RequestResponseCycle, flow: FlowControl, transport: asyncio.Transport
    ) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport

    @property
    def is_ready(self) -> bool:
        """Whether the head has gone, the end has not, and the client reads what it is sent."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.response_complete
            and not cycle.disconnected
            # uvloop raises where asyncio would drop what is written now.
            and not self._transport.is_closing()
            and not self._flow.write_paused
        )

    def write(self, payload: bytes) -> None:
        """One chunk. An empty one would end the body."""
        assert payload
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))
