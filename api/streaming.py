"""Answers on the wire by raw ASGI `send`: server-sent events, or one JSON body.

No generator and no pydantic per token: a frame is one `send` of bytes. FastAPI's StreamingResponse
alone would cost a core for 25,000 frames a second.
"""

from typing import Protocol

from starlette.types import Send

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats import Format
from api.outputs.deltas import merged
from api.shortage import Pause
from api.summary import Summary
from common.errors import PlatformError
from common.patience import Patience
from engine.broker.positions import QueuePosition

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the events of a stream otherwise.
    (b"x-accel-buffering", b"no"),
]
WAIT_IS_OVER = b": started\n\n"
"""Sent in one piece with the first event after a wait. Clients that strip every chunk they read
(vLLM's benchmark does) lose the empty line that ends a comment, and would take the first events
for more of it."""


class ClientGone(PlatformError):
    """Nobody reads any more. Never answered, because nobody would read that either."""

    code = "client_gone"


class DirectBody(Protocol):
    """The server's way past ASGI for the body of an answer whose head has been sent."""

    @property
    def is_ready(self) -> bool:
        """Whether `write` need not wait."""

    def write(self, payload: bytes) -> None:
        """Write a piece of the body, where `is_ready`."""


class Answer(Protocol):
    """Where a generation's output goes. Until it `is_started`, an error can still be a status."""

    @property
    def is_started(self) -> bool:
        """Whether the status has been sent."""

    @property
    def is_ready(self) -> bool:
        """Whether the next piece could be added at once."""

    async def report_queue(self, place: QueuePosition) -> None:
        """Tell a waiting caller where it stands."""

    async def report_pause(self, pause: Pause, choice: int = 0) -> None:
        """Tell that the answer waits for credit from `choice` on."""

    def accept(self) -> None:
        """The form that the answer must have is compiled: it may start."""

    def begin(self, num_cached_tokens: int) -> None:
        """The prompt is computed; so much of it was known already."""

    async def add(self, piece: Piece) -> None:
        """New text of one choice. Raises ClientGone."""

    def add_at_once(self, piece: Piece) -> None:
        """The same where `is_ready`, without a wait."""

    async def finish(self, summary: Summary) -> None:
        """The end; the request is settled."""

    async def fail(self, error: ErrorAnswer) -> None:
        """The end of an answer that had started."""


class StreamedAnswer:
    """Server-sent events; each piece leaves as soon as it is there."""

    def __init__(
        self,
        send: Send,
        send_body: Send,
        answer_format: Format,
        *,
        direct: DirectBody | None = None,
        send_timeout_s: float,
        may_start: bool = True,
    ) -> None:
        """The head goes by `send`, through all middleware; what follows by `send_body`, or
        `direct`."""
        self.is_started = False
        self._send = send
        self._send_body = send_body
        self._direct = direct
        self._format = answer_format
        self._patience = Patience(send_timeout_s)
        self._may_start = may_start
        """While it may not, the caller hears nothing: what comes may still be a status."""
        self._opening: bytes | None = None
        self._has_waited = False

    @property
    def is_ready(self) -> bool:
        """Whether it flows: it has started, nothing is to be said first, and the client reads."""
        return (
            self.is_started
            and not self._has_waited
            and self._direct is not None
            and self._direct.is_ready
        )

    async def report_queue(self, place: QueuePosition) -> None:
        """A comment, which every client ignores and every proxy counts as traffic."""
        if not self._may_start:
            return
        eta = "" if place.eta_ms is None else f" eta_ms={place.eta_ms}"
        loading = " model=loading" if place.is_model_loading else ""
        await self._write(f": queued position={place.position}{eta}{loading}\n\n".encode())
        self._has_waited = True

    async def report_pause(self, pause: Pause, choice: int = 0) -> None:
        """A comment each time, and once the event that the protocol has for it."""
        payload = f": paused code={pause.code} ends_in_s={pause.ends_in_s}\n\n".encode()
        if pause.is_new:
            payload = self._with_opening(self._format.paused(pause, choice)) + payload
        await self._write(payload)
        self._has_waited = True

    def accept(self) -> None:
        """From now on the caller may hear of the wait."""
        self._may_start = True

    def begin(self, num_cached_tokens: int) -> None:
        """The opening leaves with the first piece."""
        self._opening = self._format.opening(num_cached_tokens)

    async def add(self, piece: Piece) -> None:
        """One write: the opening where needed, what is new, and the end where it is one."""
        payload = self._with_opening(self._format.add(piece))
        if payload:
            await self._write_events(payload)

    def add_at_once(self, piece: Piece) -> None:
        """The same, past ASGI."""
        assert self._direct is not None
        if payload := self._with_opening(self._format.add(piece)):
            self._direct.write(payload)

    async def finish(self, summary: Summary) -> None:
        """The protocol's own end."""
        await self._write_events(self._format.closing(summary), is_last=True)

    async def fail(self, error: ErrorAnswer) -> None:
        """An error event, and the end."""
        await self._write_events(self._format.failing(error), is_last=True)

    def _with_opening(self, payload: bytes) -> bytes:
        if self._opening is not None:
            payload, self._opening = self._opening + payload, None
        return payload

    async def _write_events(self, payload: bytes, *, is_last: bool = False) -> None:
        if self._has_waited:
            self._has_waited = False
            payload = WAIT_IS_OVER + payload
        await self._write(payload, is_last=is_last)

    async def _write(self, payload: bytes, *, is_last: bool = False) -> None:
        try:
            with self._patience:
                if not self.is_started:
                    self.is_started = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                    )
                await self._send_body(
                    {"type": "http.response.body", "body": payload, "more_body": not is_last}
                )
        except (TimeoutError, OSError):
            raise ClientGone("The client has stopped reading.") from None


class WholeAnswer:
    """One JSON object at the end."""

    def __init__(self, send: Send, answer_format: Format) -> None:
        self.is_started = False
        self.is_ready = True
        self._send = send
        self._format = answer_format
        self._pieces: dict[int, list[Piece]] = {}

    async def report_queue(self, place: QueuePosition) -> None:
        """Nothing: a JSON body has no comments."""

    async def report_pause(self, pause: Pause, choice: int = 0) -> None:
        """Nothing: the body says in the end whether it was cut."""

    def accept(self) -> None:
        """Nothing: the status comes at the end."""

    def begin(self, num_cached_tokens: int) -> None:
        """Nothing: the body is written at the end."""

    async def add(self, piece: Piece) -> None:
        """Keep it."""
        self.add_at_once(piece)

    def add_at_once(self, piece: Piece) -> None:
        """Keep it."""
        self._pieces.setdefault(piece.choice, []).append(piece)

    async def finish(self, summary: Summary) -> None:
        """Send the object."""
        choices = [_joined(pieces) for _, pieces in sorted(self._pieces.items())]
        body = self._format.whole(choices, summary)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        self.is_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ErrorAnswer) -> None:
        """Never reached: nothing is sent before the end, so errors are statuses."""
        raise AssertionError("a whole answer cannot fail after it started")


def _joined(pieces: list[Piece]) -> Piece:
    """All pieces of one choice as one."""
    return Piece(
        choice=pieces[0].choice,
        deltas=tuple(merged(delta for piece in pieces for delta in piece.deltas)),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason=pieces[-1].finish_reason,
        stop=pieces[-1].stop,
        cut=pieces[-1].cut,
        prompt=pieces[0].prompt,
    )
