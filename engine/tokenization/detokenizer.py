"""Token ids to text while they arrive: whole characters only."""

import codecs
from collections.abc import Iterable

from engine.tokenization.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one choice. What it has returned, joined, is the decoded text so far.

    Bytes are held back until they complete a UTF-8 character; control tokens have no text, but for
    those in `shown`, which whoever reads the text needs to see (markers of tool calls).
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_at_start = tokenizer.strips_first_space

    def append(self, token_ids: Iterable[int]) -> str:
        """The characters that `token_ids` complete."""
        text_of, hidden = self._tokenizer.token_text, self._hidden
        raw = b"".join([text_of(token_id) for token_id in token_ids if token_id not in hidden])
        if self._is_at_start and raw:
            self._is_at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut, usually nothing."""
        return self._decoder.decode(b"", final=True)
