"""Texts, pairs of texts and ids as a model that pools wants them: with its special tokens, whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import InvalidRequest
from api.tokenizers import LoadedTokenizer
from engine.pooling import Pooling

TEXTS_PER_BATCH = 64
"""Texts that are tokenized together: what they take of memory is bounded."""

Texts = Sequence[str | tuple[str, str]]


@dataclass(frozen=True, slots=True)
class PooledInput:
    """One text, or one pair of texts, as ids with the model's special tokens."""

    token_ids: list[int]
    second_text_at: int = 0
    """Where the second text of a pair begins, if the tokenizer tells them apart."""


@dataclass(frozen=True, slots=True)
class InputReader:
    """Reads the inputs of one request."""

    loaded: LoadedTokenizer
    is_cut: bool
    """An input that is too long loses its end; else it is refused."""
    param: str
    """The field that holds them."""

    @property
    def pooling(self) -> Pooling:
        """How the model pools. Asked of models that do, by the catalogue."""
        pooling = self.loaded.pooling
        assert pooling is not None
        return pooling

    async def read_texts(self, texts: Texts) -> list[PooledInput]:
        """Texts or pairs. Raises InvalidRequest."""
        most = self.pooling.max_tokens if self.is_cut else None
        prepared = [self._prepared(each) for each in texts]
        inputs: list[PooledInput] = []
        async with self.loaded.gate:
            for start in range(0, len(prepared), TEXTS_PER_BATCH):
                some = prepared[start : start + TEXTS_PER_BATCH]
                encoded = await self.loaded.tokenizer.encode_whole(some, most)
                inputs += [PooledInput(ids, second) for ids, second in encoded]
        return [self._fitting(each) for each in inputs]

    def read_ids(self, token_ids: list[int]) -> PooledInput:
        """Ids are taken as they are. Raises InvalidRequest."""
        vocab_size = self.loaded.tokenizer.vocab_size
        if max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"An input has ids outside of the vocabulary of {vocab_size}.", param=self.param
            )
        kept = token_ids[: self.pooling.max_tokens] if self.is_cut else token_ids
        return self._fitting(PooledInput(kept))

    def _prepared(self, each: str | tuple[str, str]) -> str | tuple[str, str]:
        """As sentence-transformers hands texts to a tokenizer."""
        if isinstance(each, tuple):
            return each
        text = each.strip()
        return text.lower() if self.pooling.is_lower_case else text

    def _fitting(self, each: PooledInput) -> PooledInput:
        num_tokens, most = len(each.token_ids), self.pooling.max_tokens
        if not num_tokens:
            raise InvalidRequest("An input has no tokens.", param=self.param)
        if num_tokens > most:
            raise InvalidRequest(
                f"This model's maximum context length is {most} tokens, and an input has "
                f'{num_tokens}. Please shorten it, or send "truncate": true.',
                param=self.param,
            )
        return each
