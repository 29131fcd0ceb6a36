"""Tokens of one choice become what it says: whole characters, stop strings, calls, logprobs.

The gateway owns text and the worker owns ids. What counts as output is what was accepted here: a
token after the stop string is neither shown nor billed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from api.outputs.deltas import Delta, TextDelta
from api.outputs.reading import PLAIN, Reading
from api.scores import ScoredPrompt
from api.shortage import Cut
from engine.messages import FinishReason, TokenFrame, TokenLogprob
from engine.tokenization import Tokenizer
from engine.tokenization.detokenizer import IncrementalDetokenizer
from engine.tokenization.stop_strings import StopStrings

TextFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of the text with its log-probabilities, before it is rendered."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int
    """Bytes of this choice's tokens before it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one frame added to one choice that may be shown now."""

    choice: int
    deltas: tuple[Delta, ...] = ()
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: TextFinish | None = None
    stop: str | None = None
    """The stop string that ended it."""
    cut: Cut | None = None
    """Why it is cut off before its limit."""
    prompt: ScoredPrompt | None = None
    """How likely the prompt was, where that is wanted; on the first piece of a choice."""

    @property
    def is_plain(self) -> bool:
        """Whether it adds text and nothing else."""
        return (
            len(self.deltas) == 1
            and isinstance(self.deltas[0], TextDelta)
            and not self.tokens
            and self.finish_reason is None
        )


class Choice:
    """The text of one choice, grown frame by frame, and what it is read as."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        reading: Reading = PLAIN,
        *,
        is_silent: bool = False,
    ) -> None:
        """`is_silent`: the prompt alone was asked about, and no token is shown or counted."""
        self.index = index
        self._is_silent = is_silent
        self.finish_reason: TextFinish | None = None
        self.num_tokens = 0
        """Tokens accepted into the answer, an end-of-sequence token included: what is billed."""
        self.num_reasoning_tokens = 0
        """Those of them that are reasoning, its markers included."""
        self._tokenizer = tokenizer
        self._parser = None if reading.is_plain else reading.parser()
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, tokenizer.special_ids(reading.markers)
        )
        self._stops = StopStrings(stops) if stops else None
        self.is_plain = self._parser is None and self._stops is None and not is_silent
        """It is text and nothing else, and ends only where its worker says so."""
        self._held_tokens: list[ShownToken] = []
        self._num_token_bytes = 0
        self._num_text_bytes = 0
        self._has_logprobs = False

    def accept(self, frame: TokenFrame) -> Piece | None:
        """The new text of `frame`; None when nothing may be shown yet, or the choice has ended."""
        if self.finish_reason is not None:
            return None
        if self._is_silent:
            self.finish_reason = "length"
            return self._piece(())
        if self.is_plain and frame.is_plain:
            self.num_tokens += len(frame.token_ids)
            text = self._detokenizer.append(frame.token_ids)
            return Piece(self.index, (TextDelta(text),)) if text else None
        deltas = self._accept_tokens(frame)
        if self.finish_reason is None and frame.finish_reason is not None:
            deltas += self._end_of_text(_text_finish(frame.finish_reason))
        return self._piece(tuple(deltas + self._end_of_reading()))

    def cut_off(self, cut: Cut) -> Piece | None:
        """End it where it stands; None when it has ended."""
        if self.finish_reason is not None:
            return None
        deltas = [*self._end_of_text("length"), *self._end_of_reading()]
        piece = self._piece(tuple(deltas))
        assert piece is not None
        return replace(piece, cut=cut)

    def _end_of_text(self, reason: TextFinish) -> tuple[Delta, ...]:
        text = self._flush()
        # A stop string may be completed by the very last characters.
        self.finish_reason = self.finish_reason or reason
        return self._read(text)

    def _end_of_reading(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self.finish_reason is not None and self._parser is not None:
            deltas += self._parser.end()
            if self._parser.has_calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return deltas

    def _accept_tokens(self, frame: TokenFrame) -> list[Delta]:
        deltas: list[Delta] = []
        for token_ids, logprobs in self._steps(frame):
            self.num_tokens += len(token_ids)
            self._hold_tokens(token_ids, logprobs)
            was_reasoning = self._parser is not None and self._parser.is_reasoning
            deltas += self._read(self._through_stops(self._detokenizer.append(token_ids)))
            if self._parser is not None:
                is_reasoning = was_reasoning or self._parser.is_reasoning
                self.num_reasoning_tokens += len(token_ids) * is_reasoning
                if self._parser.is_satisfied:
                    self.finish_reason = self.finish_reason or "stop"
            if self.finish_reason is not None:
                break
        if frame.stop_token_id is not None and self.finish_reason is None:
            self.num_tokens += 1
        return deltas

    def _read(self, text: str) -> tuple[Delta, ...]:
        self._num_text_bytes += len(text.encode())
        if self._parser is not None:
            return self._parser.push(text)
        return (TextDelta(text),) if text else ()

    def _steps(
        self, frame: TokenFrame
    ) -> Iterator[tuple[tuple[int, ...], tuple[TokenLogprob, ...]]]:
        """The frame's text tokens; one by one where the text may end between them."""
        token_ids = frame.token_ids
        if frame.stop_token_id is not None and token_ids and token_ids[-1] == frame.stop_token_id:
            token_ids = token_ids[:-1]
        logprobs = frame.logprobs or ()
        if self._stops is None and self._parser is None:
            if token_ids:
                yield token_ids, logprobs[: len(token_ids)]
            return
        for position, token_id in enumerate(token_ids):
            yield (token_id,), logprobs[position : position + 1]

    def _through_stops(self, text: str) -> str:
        if self._stops is None:
            return text
        safe = self._stops.push(text)
        if self._stops.is_matched:
            self.finish_reason = "stop"
        return safe

    def _flush(self) -> str:
        """Everything that was held back: half a character, or what almost was a stop string."""
        text = self._through_stops(self._detokenizer.flush())
        if self._stops is not None and not self._stops.is_matched:
            text += self._stops.flush()
        return text

    def _hold_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        if not logprobs:
            return
        self._has_logprobs = True
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            token = self._tokenizer.token_text(token_id)
            top = tuple((self._tokenizer.token_text(other), value) for other, value in entry.top)
            self._held_tokens.append(ShownToken(token, entry.logprob, top, self._num_token_bytes))
            self._num_token_bytes += len(token)

    def _piece(self, deltas: tuple[Delta, ...]) -> Piece | None:
        if not deltas and self.finish_reason is None:
            return None
        tokens: tuple[ShownToken, ...] = ()
        if self._has_logprobs:
            tokens = self._tokens_of_text()
        stop = self._stops.matched if self._stops is not None else None
        return Piece(self.index, deltas, tokens, self.finish_reason, stop)

    def _tokens_of_text(self) -> tuple[ShownToken, ...]:
        """The held tokens whose text has begun to be shown; at the end all but the stop's.

        A special token has a name but no text, so that those behind it lag until the end.
        """
        is_cut = self.finish_reason is None or (self._stops is not None and self._stops.is_matched)
        end = self._num_text_bytes if is_cut else self._num_token_bytes + 1
        shown = tuple(token for token in self._held_tokens if token.offset < end)
        del self._held_tokens[: len(shown)]
        return shown


def _text_finish(reason: FinishReason) -> TextFinish:
    return "length" if reason == "length" else "stop"
