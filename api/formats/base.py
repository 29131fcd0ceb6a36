"""What every protocol's format can do, and how OpenAI's older two write their chunks.

A chunk is three byte strings joined: what is the same for the whole stream is encoded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from api.choices import Piece
from api.errors import ErrorAnswer
from api.shortage import Pause
from api.summary import Summary

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token."""

    response_id: str
    created_s: int
    model: str
    include_usage: bool
    has_logprobs: bool
    num_prompt_tokens: int


class Format(Protocol):
    """How one protocol writes an answer. Of one request; it may remember what it has written."""

    def opening(self, num_cached_tokens: int) -> bytes:
        """The events before the first piece; may be empty."""

    def add(self, piece: Piece) -> bytes:
        """The events of what a piece adds to its choice."""

    def paused(self, pause: Pause, choice: int) -> bytes:
        """An event that clients of the protocol do not mind: the answer waits for credit."""

    def closing(self, summary: Summary) -> bytes:
        """The events that end the stream."""

    def failing(self, error: ErrorAnswer) -> bytes:
        """The events that end a stream that cannot be completed."""

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The answer that is not streamed; `pieces` are the complete choices in order."""


FormatFactory = Callable[[AnswerHead], Format]


class ChunkFrame:
    """The constant head and tail of every chunk of one stream, and its end."""

    def __init__(self, head: AnswerHead, kind: str) -> None:
        self._include_usage = head.include_usage
        self._envelope = {
            "id": head.response_id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + encode(self._envelope)[:-1] + b',"choices":['
        # OpenAI: when usage is asked for, every chunk but the last has it as null.
        self._tail = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def choice(self, choice: bytes) -> bytes:
        """A chunk of one choice."""
        return self._head + choice + self._tail

    def paused(self, choice: bytes, pause: Pause) -> bytes:
        """A chunk that adds nothing to its choice, and says `paused`."""
        return self._head + choice + b'],"paused":' + encode(pause.as_json()) + self._tail[1:]

    def closing(self, summary: Summary) -> bytes:
        """The usage with no choices when it was asked for, then `[DONE]`."""
        if not self._include_usage:
            return DONE
        told = {"choices": [], "usage": summary.usage(), "timing": summary.timing()}
        return b"data: " + encode(self._envelope | told) + b"\n\n" + DONE

    @staticmethod
    def failing(error: ErrorAnswer) -> bytes:
        """An error event, then `[DONE]`: without it some clients hang."""
        return b"data: " + error.envelope() + b"\n\n" + DONE

    def whole(
        self, kind: str, choices: list[dict[str, Any]], summary: Summary, **more: Any
    ) -> bytes:
        """The object that is not streamed; `more` are further fields of it."""
        told = {"object": kind, "choices": choices} | more
        return encode(
            self._envelope | told | {"usage": summary.usage(), "timing": summary.timing()}
        )
