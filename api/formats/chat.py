"""`chat.completion` and its chunks."""

from collections.abc import Sequence
from typing import Any

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats.base import AnswerHead, ChunkFrame, encode
from api.formats.logprobs import chat_logprobs
from api.outputs.deltas import (
    CallDelta,
    Delta,
    ReasoningDelta,
    TextDelta,
    calls_of,
    chunks,
    reasoning_of,
    text_of,
)
from api.shortage import Pause
from api.summary import Summary

HOLE = b"\0"
"""No JSON has this byte."""


class ChatFormat:
    """Role first, then content, reasoning and calls as they come, one finish reason a choice."""

    def __init__(self, head: AnswerHead) -> None:
        self._has_logprobs = head.has_logprobs
        self._chunks = ChunkFrame(head, "chat.completion.chunk")
        self._opened: set[int] = set()
        self._around_text: dict[int, list[bytes]] = {}
        """Of each choice, what stands before and behind the text of a chunk that has only text."""

    def opening(self, num_cached_tokens: int) -> bytes:
        """Nothing: each choice opens by itself."""
        return b""

    def add(self, piece: Piece) -> bytes:
        """One chunk for each kind of thing that is new."""
        if piece.is_plain and piece.choice in self._opened:
            return self._text(piece.choice, piece.deltas[0])
        payload = b""
        if piece.choice not in self._opened:
            self._opened.add(piece.choice)
            payload = self._chunk(piece.choice, b'{"role":"assistant","content":""}')
        logprobs = b"null"
        if piece.tokens:
            logprobs = encode({"content": chat_logprobs(piece.tokens), "refusal": None})
        deltas = chunks(piece.deltas) or ((TextDelta(""),) if piece.tokens else ())
        for delta in deltas:
            payload += self._chunk(piece.choice, _delta_json(delta), logprobs)
            logprobs = b"null"
        if piece.finish_reason is not None:
            reason = b'"%s"' % piece.finish_reason.encode()
            if piece.cut is not None:
                reason += b',"finish_details":' + encode(piece.cut.as_json())
            payload += self._chunk(piece.choice, b"{}", reason=reason)
        return payload

    def paused(self, pause: Pause, choice: int) -> bytes:
        """An empty delta, beside which `paused` says what the answer waits for."""
        return self._chunks.paused(_choice_json(choice, b"{}", b"null", b"null"), pause)

    def closing(self, summary: Summary) -> bytes:
        """Usage when it was asked for, and the end."""
        return self._chunks.closing(summary)

    def failing(self, error: ErrorAnswer) -> bytes:
        """An error event, and the end."""
        return self._chunks.failing(error)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `chat.completion` object."""
        prompt = pieces[0].prompt
        more = {} if prompt is None else {"prompt_logprobs": prompt.listed}
        choices = [self._choice(piece) for piece in pieces]
        return self._chunks.whole("chat.completion", choices, summary, **more)

    def _chunk(
        self, choice: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        return self._chunks.choice(_choice_json(choice, delta, logprobs, reason))

    def _text(self, choice: int, delta: Delta) -> bytes:
        assert isinstance(delta, TextDelta)
        around = self._around_text.get(choice)
        if around is None:
            around = self._chunk(choice, b'{"content":%b}' % HOLE).split(HOLE)
            self._around_text[choice] = around
        return around[0] + encode(delta.text) + around[1]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        calls = [_call(call) for call in calls_of(piece.deltas)]
        text, reasoning = text_of(piece.deltas), reasoning_of(piece.deltas)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": chat_logprobs(piece.tokens), "refusal": None}
        return {
            "index": piece.choice,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        } | ({} if piece.cut is None else {"finish_details": piece.cut.as_json()})


def _choice_json(choice: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
        choice,
        delta,
        logprobs,
        reason,
    )


def _delta_json(delta: Delta) -> bytes:
    if isinstance(delta, TextDelta):
        return b'{"content":' + encode(delta.text) + b"}"
    if isinstance(delta, ReasoningDelta):
        return b'{"reasoning_content":' + encode(delta.text) + b"}"
    if delta.name is None:
        part: dict[str, Any] = {"function": {"arguments": delta.arguments}}
    else:
        part = _call(delta)
    return encode({"tool_calls": [{"index": delta.index} | part]})


def _call(call: CallDelta) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
