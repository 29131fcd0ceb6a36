"""`text_completion`, whole and in chunks, which have the same name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats.base import AnswerHead, ChunkFrame, encode
from api.formats.logprobs import legacy_logprobs
from api.outputs.deltas import TextDelta, text_of
from api.scores import joined
from api.shortage import Pause
from api.summary import Summary

KIND = "text_completion"


class CompletionFormat:
    """The older form: text without a role."""

    def __init__(
        self, head: AnswerHead, echoes: Sequence[str] = (), *, num_best: int | None = None
    ) -> None:
        """`echoes`: what each choice begins with; `num_best`: how many are shown of a contest."""
        self._has_logprobs = head.has_logprobs
        self._echoes = dict(enumerate(echoes))
        self._num_best = num_best
        self._offsets: dict[int, int] = {}
        self._chunks = ChunkFrame(head, KIND)

    def opening(self, num_cached_tokens: int) -> bytes:
        """Nothing: there is no role."""
        return b""

    def add(self, piece: Piece) -> bytes:
        """New text of one choice, and its end in a chunk of its own."""
        payload = b""
        shown = self._with_echo(piece)
        if text_of(shown.deltas) or piece.tokens or piece.prompt is not None:
            payload = self._chunks.choice(encode(self._choice(shown) | {"finish_reason": None}))
        if piece.finish_reason is not None:
            ended = Piece(piece.choice, finish_reason=piece.finish_reason, cut=piece.cut)
            payload += self._chunks.choice(encode(self._choice(ended)))
        return payload

    def paused(self, pause: Pause, choice: int) -> bytes:
        """No text, beside which `paused` says what the answer waits for."""
        return self._chunks.paused(encode(self._choice(Piece(choice))), pause)

    def closing(self, summary: Summary) -> bytes:
        """Usage when it was asked for, and the end."""
        return self._chunks.closing(summary)

    def failing(self, error: ErrorAnswer) -> bytes:
        """An error event, and the end."""
        return self._chunks.failing(error)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `text_completion` object."""
        if self._num_best is not None:
            pieces = best_of(pieces, self._num_best, len(pieces) // summary.num_prompts)
        echoed = [self._with_echo(piece) for piece in pieces]
        return self._chunks.whole(KIND, [self._choice(piece) for piece in echoed], summary)

    def _with_echo(self, piece: Piece) -> Piece:
        echo = self._echoes.pop(piece.choice, "")
        self._offsets.setdefault(piece.choice, len(echo))
        return replace(piece, deltas=(TextDelta(echo + text_of(piece.deltas)),))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        text = text_of(piece.deltas)
        choice = {
            "index": piece.choice,
            "text": text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if self._has_logprobs and (piece.tokens or text):
            choice["logprobs"] = self._logprobs(piece)
        if piece.cut is not None:
            choice["finish_details"] = piece.cut.as_json()
        if piece.prompt is not None and piece.prompt.listed is not None:
            choice["prompt_logprobs"] = piece.prompt.listed
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """Those of the piece's tokens, behind those of the prompt where it is echoed."""
        start = self._offsets.get(piece.choice, 0)
        logprobs = legacy_logprobs(piece.tokens, start)
        spelled = b"".join(shown.token for shown in piece.tokens)
        self._offsets[piece.choice] = start + len(spelled.decode(errors="replace"))
        if piece.prompt is not None and piece.prompt.echoed is not None:
            logprobs = joined((piece.prompt.echoed, logprobs))
        return logprobs.as_json()


def best_of(pieces: Sequence[Piece], num_best: int, num_choices: int) -> list[Piece]:
    """Of each prompt's `num_choices` choices the most likely ones by the mean of their tokens."""
    winners: list[Piece] = []
    for first in range(0, len(pieces), num_choices):
        rivals = pieces[first : first + num_choices]
        ranked = sorted(rivals, key=_mean_logprob, reverse=True)[:num_best]
        winners += [replace(piece, choice=len(winners) + at) for at, piece in enumerate(ranked)]
    return winners


def _mean_logprob(piece: Piece) -> float:
    if not piece.tokens:
        return float("-inf")
    return sum(token.logprob for token in piece.tokens) / len(piece.tokens)
