"""How likely the tokens of a prompt were, for callers who score texts: vLLM's list, and OpenAI's echo.

Both are rendered part by part, as the prompt is computed: a long prompt has a hundred thousand entries,
which would hold up every other stream if they were rendered at once.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from api.choices import Piece
from api.formats.logprobs import token_string
from api.scores import LegacyLogprobs, ScoredPrompt
from engine.messages import PromptLogprobs
from engine.tokenization import Tokenizer
from engine.tokenization.detokenizer import IncrementalDetokenizer

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ScoringWish:
    """What a caller wants to know of its prompt; None is off, 0 the prompt's own tokens only."""

    num_listed: int | None = None
    """Most likely tokens beside each in `prompt_logprobs`."""
    num_echoed: int | None = None
    """The same in the `logprobs` of an echoed prompt."""

    @property
    def num_top(self) -> int | None:
        """As many as the engine has to tell."""
        return max((n for n in (self.num_listed, self.num_echoed) if n is not None), default=None)


NO_SCORING = ScoringWish()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was told of one prompt token."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptScoring:
    """The scores of one prompt as they arrive. Pieces of the answer wait until all are there."""

    def __init__(self, tokenizer: Tokenizer, token_ids: list[int], wish: ScoringWish) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._wish = wish
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = 0
        self._held: list[Piece] = []
        self._opened: set[int] = set()
        # The first token comes after nothing, so that it has no logprob.
        self._num_told = 1
        self._listed = [b"null"]
        self._echoed = LegacyLogprobs()
        self._echo(token_ids[0], None, None)

    @property
    def is_complete(self) -> bool:
        """Whether every token of the prompt is told of."""
        return self._num_told == len(self._token_ids)

    def add(self, told: PromptLogprobs) -> None:
        """The next part; the stream has seen to it that nothing is missing and nothing repeated."""
        assert told.first_position == self._num_told, "a part of the prompt's logprobs is missing"
        entries = list(self._entries(told))
        self._num_told = told.end
        if self._wish.num_listed is not None:
            rendered = encode([self._listing(entry, self._wish.num_listed) for entry in entries])
            self._listed.append(rendered[1:-1])
        if self._wish.num_echoed is not None:
            for entry in entries:
                top = entry.top[: self._wish.num_echoed]
                likeliest = {self._name(token_id): value for token_id, value in top}
                self._echo(entry.token_id, entry.logprob, likeliest)

    def ready(self, piece: Piece) -> list[Piece]:
        """The pieces that may be shown now; the first of each choice has the whole prompt's scores."""
        self._held.append(piece)
        if not self.is_complete:
            return []
        held, self._held = self._held, []
        return [self._with_prompt(each) for each in held]

    def _with_prompt(self, piece: Piece) -> Piece:
        if piece.choice in self._opened:
            return piece
        self._opened.add(piece.choice)
        listed = echoed = None
        if self._wish.num_listed is not None:
            listed = msgspec.Raw(b"[" + b",".join(self._listed) + b"]")
        if self._wish.num_echoed is not None:
            echoed = self._echoed
        return replace(piece, prompt=ScoredPrompt(listed, echoed))

    def _entries(self, told: PromptLogprobs) -> Iterator[_Entry]:
        num_tokens, num_top = told.num_tokens, told.num_top
        logprobs = struct.unpack(f"<{num_tokens}f", told.logprobs)
        ranks = struct.unpack(f"<{num_tokens}i", told.ranks)
        top_ids = struct.unpack(f"<{num_tokens * num_top}i", told.top_ids)
        top_logprobs = struct.unpack(f"<{num_tokens * num_top}f", told.top_logprobs)
        for index in range(num_tokens):
            those = slice(index * num_top, (index + 1) * num_top)
            top = tuple(zip(top_ids[those], top_logprobs[those], strict=True))
            token_id = self._token_ids[told.first_position + index]
            yield _Entry(token_id, logprobs[index], ranks[index], top)

    def _listing(self, entry: _Entry, num_top: int) -> dict[str, dict[str, Any]]:
        """vLLM's form: by id, the prompt's own token first."""
        ranked = [(token_id, value, at) for at, (token_id, value) in enumerate(entry.top, 1)]
        told = [(entry.token_id, entry.logprob, entry.rank), *ranked[:num_top]]
        listing: dict[str, dict[str, Any]] = {}
        for token_id, logprob, rank in told:
            name = self._name(token_id)
            described = {"logprob": logprob, "rank": rank, "decoded_token": name}
            listing.setdefault(str(token_id), described)
        return listing

    def _echo(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self._echoed.append(self._name(token_id), logprob, top, self._offset)
        self._offset += len(self._detokenizer.append((token_id,)))

    def _name(self, token_id: int) -> str:
        return token_string(self._tokenizer.token_text(token_id))
