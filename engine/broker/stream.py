"""The frames of one request as they arrive at the API node, in order and without a gap."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from engine.errors import RequestLost
from engine.messages import GenerateRequest, TokenFrame

Cancel = Callable[[GenerateRequest], Awaitable[None]]


class RequestStream(AsyncIterator[TokenFrame]):
    """Frames of one request, for one reader.

    Ends when every choice has a `finish_reason`, or after a frame with an `error`. Raises RequestLost
    where the worker is gone or a frame is missing; `emitted_token_ids` is what the reader got of
    each choice before that: with it the request can be submitted again.
    At most `authorized_tokens` frames of each choice wait in it.
    """

    __slots__ = (
        "_cancel",
        "_error",
        "_frames",
        "_open_choices",
        "_waiter",
        "emitted_token_ids",
        "gone_since",
        "is_confirmed",
        "request",
    )

    def __init__(self, request: GenerateRequest, *, is_confirmed: bool, cancel: Cancel) -> None:
        self.request = request
        self.is_confirmed = is_confirmed
        self.emitted_token_ids = [
            list(request.emitted_token_ids) for _ in range(request.num_choices)
        ]
        self.gone_since: float | None = None
        """When Redis was first seen not to know the request (loop time)."""
        self._cancel = cancel
        self._frames: deque[TokenFrame] = deque()
        self._open_choices = set(range(request.num_choices))
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestLost | None = None

    @property
    def is_closed(self) -> bool:
        """Nothing more will be received."""
        return not self._open_choices or self._error is not None

    @property
    def has_emitted(self) -> bool:
        """A token has been received: the request may not simply start again."""
        return any(self.emitted_token_ids) or len(self._open_choices) < self.request.num_choices

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> TokenFrame:
        while not self._frames:
            if self._error is not None:
                raise self._error
            if not self._open_choices:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()

    async def cancel(self) -> None:
        """Nobody listens any more: withdraw the request wherever it is."""
        await self._cancel(self.request)

    def receive(self, frame: TokenFrame) -> None:
        """Accept the next frame of a choice; drop what is stale or repeated; fail on a gap."""
        attempt = self.request.attempt
        if self.is_closed or frame.attempt < attempt or frame.choice not in self._open_choices:
            return
        if frame.attempt > attempt:
            # The queue gave the request to another worker before the first one had said anything.
            if self.has_emitted:
                return
            self.request = _with_attempt(self.request, frame.attempt)
        if frame.error is not None:
            self._open_choices.clear()
            self._accept(frame)
            return
        emitted = self.emitted_token_ids[frame.choice]
        if frame.first_index < len(emitted):
            return
        if frame.first_index > len(emitted):
            self.fail(f"tokens {len(emitted)} to {frame.first_index - 1} are missing")
            return
        emitted.extend(frame.token_ids)
        if frame.finish_reason is not None:
            self._open_choices.discard(frame.choice)
        self._accept(frame)

    def fail(self, reason: str) -> None:
        """End the stream: its remaining tokens will never come."""
        if self.is_closed:
            return
        self._error = RequestLost(
            f"the request was lost: {reason}",
            request_id=self.request.request_id,
            attempt=self.request.attempt,
        )
        self._wake()

    def restart(self) -> GenerateRequest:
        """The request for another attempt; only while nothing was emitted."""
        assert not self.has_emitted
        self.request = _with_attempt(self.request, self.request.attempt + 1)
        self.gone_since = None
        return self.request

    def _accept(self, frame: TokenFrame) -> None:
        self._frames.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _with_attempt(request: GenerateRequest, attempt: int) -> GenerateRequest:
    return msgspec.structs.replace(request, attempt=attempt)
