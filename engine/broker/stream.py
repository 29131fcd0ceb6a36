"""The frames of one request as they arrive at the API node, in order and without a gap."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from engine.errors import RequestLost
from engine.messages import GenerateRequest, PromptLogprobs, TokenFrame

Cancel = Callable[[GenerateRequest], Awaitable[None]]
Sink = Callable[[TokenFrame], bool]


class RequestStream(AsyncIterator[TokenFrame]):
    """Frames of one request, for one reader, whatever becomes of the workers that produce them.

    Ends when every choice has a `finish_reason`, or after a frame with an `error`. Raises RequestLost
    where the request was given up.
    At most `authorized_tokens` frames of each choice wait in it.
    """

    __slots__ = (
        "_cancel",
        "_error",
        "_frames",
        "_open_choices",
        "_waiter",
        "emitted_token_ids",
        "first_prompt_logprob",
        "gone_since",
        "is_queued",
        "is_running",
        "request",
        "sink",
        "worker",
    )

    def __init__(self, request: GenerateRequest, *, cancel: Cancel) -> None:
        self.request = request
        """The attempt that is under way."""
        self.is_queued = False
        """Redis has said that it has the request: where it knows nothing of it by now, it is lost."""
        self.is_running = False
        """A frame of this attempt has come: it waits in no queue."""
        self.worker: str | None = None
        """Who sent the last frame."""
        self.emitted_token_ids: list[list[int]] = [[] for _ in range(request.num_choices)]
        """What was received of each choice, over all attempts."""
        self.first_prompt_logprob = request.first_prompt_logprob
        """The first prompt token whose logprob was not received."""
        self.sink: Sink | None = None
        """Offered each frame that the reader waits for; it goes on waiting where this takes it."""
        self.gone_since: float | None = None
        """When Redis was first seen not to know the request (loop time)."""
        self._cancel = cancel
        self._frames: deque[TokenFrame] = deque()
        self._open_choices = set(range(request.num_choices))
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    @property
    def is_closed(self) -> bool:
        """Nothing more will be received."""
        return not self._open_choices or self._error is not None

    @property
    def has_frames(self) -> bool:
        """Whether the next frame is here already."""
        return bool(self._frames)

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

    def receive(self, frame: TokenFrame, worker: str) -> bool:
        """Accept the next frame of a choice and drop what is stale or repeated.

        False where the frame does not continue what was received: tokens are missing, or the attempt
        contradicts an earlier one. The stream is as before; another attempt can put it right.
        """
        if (
            self.is_closed
            or frame.attempt < self.request.attempt
            or frame.choice not in self._open_choices
        ):
            return True
        self.note_attempt(frame.attempt)
        if frame.error is not None:
            self._open_choices.clear()
            self._accept(frame, worker)
            return True
        if frame.prompt_logprobs is not None:
            return self._receive_prompt(frame, frame.prompt_logprobs, worker)
        return not self._misses_prompt(frame) and self._receive_tokens(frame, worker)

    def _receive_tokens(self, frame: TokenFrame, worker: str) -> bool:
        """The next tokens of a choice; see `receive`."""
        emitted = self.emitted_token_ids[frame.choice]
        again = emitted[frame.first_index : frame.first_index + len(frame.token_ids)]
        if frame.first_index > len(emitted) or tuple(again) != frame.token_ids[: len(again)]:
            return False
        if again and len(again) == len(frame.token_ids):
            return True
        frame = _without_first(frame, len(again)) if again else frame
        emitted.extend(frame.token_ids)
        if frame.finish_reason is not None:
            self._open_choices.discard(frame.choice)
        self._accept(frame, worker)
        return True

    def _receive_prompt(self, frame: TokenFrame, told: PromptLogprobs, worker: str) -> bool:
        """The next logprobs of the prompt; see `receive`."""
        wanted = self.first_prompt_logprob
        if told.first_position > wanted:
            return False
        if told.end > wanted:
            self.first_prompt_logprob = told.end
            told = told.from_position(wanted)
            self._accept(msgspec.structs.replace(frame, prompt_logprobs=told), worker)
        return True

    def _misses_prompt(self, frame: TokenFrame) -> bool:
        """Whether a token has come before the logprobs of the prompt, which its choice tells first."""
        request = self.request
        return (
            request.sampling.num_prompt_logprobs is not None
            and self.first_prompt_logprob < len(request.prompt_token_ids)
            and frame.choice == min(self._open_choices)
            and not frame.is_accepted
        )

    def end_choice(self, choice: int) -> None:
        """The reader has had enough of one choice: what else comes of it is dropped."""
        self._open_choices.discard(choice)

    def note_attempt(self, attempt: int) -> None:
        """The queue gave the request to another worker, which starts from the same message."""
        if attempt > self.request.attempt:
            self.request = msgspec.structs.replace(self.request, attempt=attempt)
            self.is_running = False

    def fail(self, reason: str) -> None:
        """End the stream: its remaining tokens will never come."""
        if self.is_closed:
            return
        self._error = RequestLost(
            f"The answer could not be completed: {reason}. Nothing was charged; please try again.",
            request_id=self.request.request_id,
            attempt=self.request.attempt,
        )
        self._wake()

    def authorize(self, authorized_tokens: int) -> None:
        """The fence of this attempt and of those to come; whoever runs it must be told, too."""
        self.request = msgspec.structs.replace(self.request, authorized_tokens=authorized_tokens)

    def restart(self) -> None:
        """The request becomes that of another attempt, which goes on behind what was received."""
        request = msgspec.structs.replace(
            self.request,
            attempt=self.request.attempt + 1,
            first_prompt_logprob=self.first_prompt_logprob,
        )
        if self.has_emitted:
            ended = set(range(request.num_choices)) - self._open_choices
            request = msgspec.structs.replace(
                request,
                emitted_token_ids=tuple(map(tuple, self.emitted_token_ids)),
                ended_choices=tuple(sorted(ended)),
            )
        self.request = request
        self.is_running = False
        self.gone_since = None

    def _accept(self, frame: TokenFrame, worker: str) -> None:
        self.worker = worker or self.worker
        self.is_running = self.is_running or not frame.is_accepted
        is_waited_for = self._waiter is not None and not self._waiter.done()
        if is_waited_for and self._is_taken(frame):
            return
        self._frames.append(frame)
        self._wake()

    def _is_taken(self, frame: TokenFrame) -> bool:
        """Whether the sink has dealt with the frame. If it fails, that is for this stream's reader to
        hear: what calls it reads the frames of every stream.
        """
        if self.sink is None:
            return False
        try:
            return self.sink(frame)
        except Exception as error:
            self._error = error
            self._wake()
            return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _without_first(frame: TokenFrame, count: int) -> TokenFrame:
    return msgspec.structs.replace(
        frame,
        first_index=frame.first_index + count,
        token_ids=frame.token_ids[count:],
        logprobs=None if frame.logprobs is None else frame.logprobs[count:],
    )
