"""Anthropic's `message`, whole and as named events.

Their SDKs drop an event without a name, and read the prompt's true length from the first one.
"""

import json
from collections.abc import Sequence
from typing import Any

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats.base import AnswerHead, encode
from api.outputs.deltas import CallDelta, Delta, ReasoningDelta, TextDelta, chunks, merged
from api.shortage import Cut, Pause
from api.summary import Summary

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Blocks of text, thinking and tool use, one open at a time."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._index = -1
        self._open: tuple[type[Delta], int] | None = None
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._cut: Cut | None = None

    def opening(self, num_cached_tokens: int) -> bytes:
        """`message_start`, with the tokens of the prompt."""
        usage = _usage(self._head.num_prompt_tokens, num_cached_tokens, 0)
        message = self._message([], None, None) | {"usage": usage}
        return event("message_start", message=message)

    def add(self, piece: Piece) -> bytes:
        """Deltas of blocks; a block opens where the kind of output changes."""
        payload = b"".join(self._delta(delta) for delta in chunks(piece.deltas))
        if piece.finish_reason is not None:
            payload += self._close_block()
            self._stop_reason, self._stop_sequence = _stop(piece)
            self._cut = piece.cut
        return payload

    def paused(self, pause: Pause, choice: int) -> bytes:
        """A `ping`, which their clients ignore, with what the answer waits for."""
        return event("ping", paused=pause.as_json())

    def closing(self, summary: Summary) -> bytes:
        """Why it ended and what it used, then `message_stop`."""
        delta: dict[str, Any] = {
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
        } | _details(self._cut)
        told = {"usage": _told(summary), "timing": summary.timing()}
        return event("message_delta", delta=delta, **told) + event("message_stop")

    def failing(self, error: ErrorAnswer) -> bytes:
        """The `error` event, which their SDKs raise."""
        return b"event: error\ndata: " + error.anthropic_envelope() + b"\n\n"

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `message` object."""
        (piece,) = pieces
        content = [_block(delta) for delta in merged(piece.deltas)]
        told = {"usage": _told(summary), "timing": summary.timing()}
        return encode(self._message(content, *_stop(piece)) | _details(piece.cut) | told)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._head.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _delta(self, delta: Delta) -> bytes:
        payload = b""
        key = (type(delta), delta.index if isinstance(delta, CallDelta) else 0)
        if self._open != key:
            payload = self._close_block()
            self._index += 1
            self._open = key
            block = _block(delta, is_empty=True)
            payload += event("content_block_start", index=self._index, content_block=block)
        if (change := _change(delta)) is not None:
            payload += event("content_block_delta", index=self._index, delta=change)
        return payload

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        payload = b""
        if kind is ReasoningDelta:
            signature = {"type": "signature_delta", "signature": ""}
            payload = event("content_block_delta", index=self._index, delta=signature)
        return payload + event("content_block_stop", index=self._index)


def event(kind: str, **content: Any) -> bytes:
    """One named event; the name is in its data, too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind} | content))


def _details(cut: Cut | None) -> dict[str, Any]:
    return {} if cut is None else {"stop_details": {"type": cut.code, "explanation": cut.message}}


def _stop(piece: Piece) -> tuple[str, str | None]:
    if piece.stop is not None and piece.finish_reason == "stop":
        return "stop_sequence", piece.stop
    assert piece.finish_reason is not None
    return STOP_REASONS[piece.finish_reason], None


def _block(delta: Delta, *, is_empty: bool = False) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"type": "text", "text": "" if is_empty else delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"type": "thinking", "thinking": "" if is_empty else delta.text, "signature": ""}
    arguments = {} if is_empty else input_object(delta.arguments)
    return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": arguments}


def _change(delta: Delta) -> dict[str, Any] | None:
    if isinstance(delta, TextDelta):
        return {"type": "text_delta", "text": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"type": "thinking_delta", "thinking": delta.text}
    # litellm#29286: an empty piece confuses readers of the partial JSON.
    return (
        {"type": "input_json_delta", "partial_json": delta.arguments} if delta.arguments else None
    )


def input_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; empty where the model wrote none, or was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Anthropic counts cached tokens beside `input_tokens`, not within."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def _told(summary: Summary) -> dict[str, Any]:
    usage = _usage(summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens)
    return usage | summary.money()
