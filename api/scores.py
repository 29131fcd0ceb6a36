"""Log-probabilities on their way to a caller, ready to be written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(slots=True)
class LegacyLogprobs:
    """OpenAI's older form: parallel lists, an entry in each for every token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    """None for the first token of a prompt: it comes after nothing."""
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    """Characters of the choice's text before each token."""

    def append(
        self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int
    ) -> None:
        """One more token."""
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def as_json(self) -> dict[str, Any]:
        """The `logprobs` object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def joined(parts: Iterable[LegacyLogprobs]) -> LegacyLogprobs:
    """One after the other."""
    whole = LegacyLogprobs()
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """How likely the tokens of a prompt were; each form only where it is wanted."""

    listed: msgspec.Raw | None = None
    """The whole list of vLLM's `prompt_logprobs`."""
    echoed: LegacyLogprobs | None = None
