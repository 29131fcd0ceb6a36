"""What is asked: four kinds of load, made of words that are one token each.

A prompt of N words is N tokens in every engine that reads this tokenizer, so each counts the same.
The content depends on trace, rate and seed: no cell finds its prompts in a prefix cache that an
earlier cell filled, and every engine gets the same text.
"""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

WORD = re.compile("Ġ[a-z]{3,}")
"""Tokens of a byte-level vocabulary that are a space and a lower-case word."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace: words are tokens."""

    words: list[str]
    output_tokens: int

    @property
    def prompt(self) -> str:
        """The text; each word with the space that belongs to its token."""
        return "".join(f" {word}" for word in self.words)


@dataclass(frozen=True, slots=True)
class Dice:
    """Randomness of one cell and the words to choose from."""

    random: random.Random
    vocabulary: list[str]

    def words(self, num_words: int) -> list[str]:
        """`num_words` words, each of one token."""
        return self.random.choices(self.vocabulary, k=num_words)

    def between(self, low: int, high: int) -> int:
        """A length whose logarithm is uniform: many short ones, few long ones."""
        return round(low * math.pow(high / low, self.random.random()))


@dataclass(frozen=True, slots=True)
class Trace:
    """A kind of load: `requests(dice, n)` makes n of them."""

    name: str
    title: str
    requests: Callable[[Dice, int], list[Request]]


def _chat(dice: Dice, num_requests: int) -> list[Request]:
    return [Request(dice.words(256), 64) for _ in range(num_requests)]


def _decode(dice: Dice, num_requests: int) -> list[Request]:
    return [Request(dice.words(32), 256) for _ in range(num_requests)]


def _prefix(dice: Dice, num_requests: int) -> list[Request]:
    shared = dice.words(512)
    return [Request(shared + dice.words(64), 32) for _ in range(num_requests)]


def _mixed(dice: Dice, num_requests: int) -> list[Request]:
    """One in twenty is long, in every twenty: no seed has none of them."""
    requests = []
    for start in range(0, num_requests, 20):
        long_one = start + dice.random.randrange(20)
        for index in range(start, min(start + 20, num_requests)):
            length = 1536 if index == long_one else dice.between(32, 512)
            requests.append(Request(dice.words(length), dice.between(16, 128)))
    return requests


TRACES = {
    trace.name: trace
    for trace in (
        Trace("chat", "short chat: 256 tokens in, 64 out", _chat),
        Trace("mixed", "mixed: 32–512 tokens in (1536 for 5 %), 16–128 out", _mixed),
        Trace("prefix", "shared prefix: 512 shared + 64 own tokens in, 32 out", _prefix),
        Trace("decode", "decode-heavy: 32 tokens in, 256 out", _decode),
    )
}


def vocabulary(model_directory: Path) -> list[str]:
    """Words of one token each, in the order of the vocabulary."""
    tokens = Tokenizer.from_file(str(model_directory / "tokenizer.json")).get_vocab()
    return [token[1:] for token in sorted(tokens, key=tokens.__getitem__) if WORD.fullmatch(token)]


def make_requests(trace: str, content: str, num_requests: int, words: list[str]) -> list[Request]:
    """The requests of one cell; `content` is what its text depends on besides the trace."""
    dice = Dice(random.Random(f"{trace}/{content}"), words)
    return TRACES[trace].requests(dice, num_requests)


def write_jsonl(path: Path, requests: list[Request]) -> None:
    """In the form of `vllm bench serve --dataset-name custom`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"prompt": request.prompt, "output_tokens": request.output_tokens})
        for request in requests
    ]
    path.write_text("\n".join(lines) + "\n")
