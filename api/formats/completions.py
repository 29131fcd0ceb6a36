"""`text_completion`, whole and in chunks, which have the same name."""

from collections.abc import Sequence
from typing import Any

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats.base import AnswerHead, ChunkFrame, encode
from api.formats.logprobs import legacy_logprobs
from api.outputs.deltas import text_of
from api.summary import Summary

KIND = "text_completion"


class CompletionFormat:
    """The older form: text without a role."""

    def __init__(self, head: AnswerHead) -> None:
        self._has_logprobs = head.has_logprobs
        self._offsets: dict[int, int] = {}
        self._chunks = ChunkFrame(head, KIND)

    def opening(self, num_cached_tokens: int) -> bytes:
        """Nothing: there is no role."""
        return b""

    def add(self, piece: Piece) -> bytes:
        """New text of one choice, and its end in a chunk of its own."""
        payload = b""
        text = text_of(piece.deltas)
        if text or piece.tokens:
            payload = self._chunks.choice(encode(self._choice(piece) | {"finish_reason": None}))
        if piece.finish_reason is not None:
            ended = Piece(piece.choice, finish_reason=piece.finish_reason)
            payload += self._chunks.choice(encode(self._choice(ended)))
        return payload

    def closing(self, summary: Summary) -> bytes:
        """Usage when it was asked for, and the end."""
        return self._chunks.closing(summary)

    def failing(self, error: ErrorAnswer) -> bytes:
        """An error event, and the end."""
        return self._chunks.failing(error)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `text_completion` object."""
        return self._chunks.whole(KIND, [self._choice(piece) for piece in pieces], summary)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        text = text_of(piece.deltas)
        if self._has_logprobs and (piece.tokens or text):
            start = self._offsets.get(piece.choice, 0)
            logprobs = legacy_logprobs(piece.tokens, start)
            self._offsets[piece.choice] = start + sum(map(len, logprobs["tokens"]))
        return {
            "index": piece.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
