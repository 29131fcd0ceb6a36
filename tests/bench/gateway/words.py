"""Tokens that tell the time: the null engines say them, the client reads off a frame's delay."""

import json
import re
import time
from pathlib import Path

NUM_WORDS = 16_384
"""Milliseconds until the clock begins anew: longer than any frame should be on its way."""
PLAIN = re.compile("Ġ?[A-Za-z0-9]+")
"""Byte-level BPE writes a space as Ġ."""


class Words:
    """One word of the vocabulary for each millisecond: plain ASCII that no JSON escapes."""

    def __init__(self, directory: Path) -> None:
        vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
        plain = [token for token in sorted(vocabulary) if PLAIN.fullmatch(token)][:NUM_WORDS]
        assert len(plain) == NUM_WORDS, "the vocabulary is too small to tell the time"
        self.texts = [token.replace("Ġ", " ") for token in plain]
        self.token_ids = [vocabulary[token] for token in plain]
        self._of_text = {text.encode(): number for number, text in enumerate(self.texts)}

    def delay_ms(self, word: bytes, now_ms: float) -> float:
        """How long ago `word` was said."""
        return (now_ms - self._of_text[word]) % NUM_WORDS


def clock_ms() -> float:
    """The one clock of all processes of this machine."""
    return time.monotonic() * 1_000


def now_word() -> int:
    """The number of the word that says this moment."""
    return int(clock_ms()) % NUM_WORDS
