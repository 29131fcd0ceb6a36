"""The tokenizers of the hosted models: loaded on first use, in a thread, and kept."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from api.conversation import Conversation
from api.errors import InvalidRequest, UnsupportedParameter
from engine.catalog import HostedModel
from engine.errors import PromptTooLong
from engine.pooling import Pooling, read_pooling
from engine.tokenization import Tokenizer

SHORT_PROMPT_CHARACTERS = 16_384
"""Below, tokenizing takes at most a few milliseconds and never waits for longer prompts."""


def too_long(context_length: int, num_tokens: int | None = None) -> PromptTooLong:
    """The error whose phrase clients look for (litellm#10793: "maximum context length")."""
    yours = "more than that" if num_tokens is None else f"{num_tokens} tokens"
    return PromptTooLong(
        f"This model's maximum context length is {context_length} tokens, and room for at least "
        f"one token of output is needed. Your prompt has {yours}. Please shorten it.",
        context_length=context_length,
    )


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with what bounds its input."""

    tokenizer: Tokenizer
    context_length: int
    gate: asyncio.Semaphore
    """Bounds how many long prompts are tokenized at once, over all models."""
    pooling: Pooling | None = None
    """How its inputs become vectors; None for a model that writes."""

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The rendered conversation as ids. Raises PromptTooLong, TemplateRejected."""
        size = conversation.num_characters
        self._refuse_hopeless(size)
        if size <= SHORT_PROMPT_CHARACTERS:
            return self._fitting(await self._render(conversation))
        async with self.gate:
            return self._fitting(await self._render(conversation))

    async def _render(self, conversation: Conversation) -> list[int]:
        return await self.tokenizer.encode_chat(
            conversation.messages,
            tools=conversation.tools_for_template(),
            continue_final_message=conversation.is_continued,
            **conversation.template_variables,
        )

    async def encode_text(self, text: str) -> list[int]:
        """A bare prompt as ids. Raises PromptTooLong."""
        self._refuse_hopeless(len(text))
        if len(text) <= SHORT_PROMPT_CHARACTERS:
            return self._fitting(await self.tokenizer.encode_text(text, add_special_tokens=True))
        async with self.gate:
            return self._fitting(await self.tokenizer.encode_text(text, add_special_tokens=True))

    async def encode_infill(self, prefix_ids: list[int], suffix: str) -> list[int]:
        """What is to be written between a prefix and a suffix. Raises UnsupportedParameter."""
        tokenizer = self.tokenizer
        if tokenizer.infill_ids is None:
            raise UnsupportedParameter(
                "This model was not trained to fill in the middle of a text.", param="suffix"
            )
        self._refuse_hopeless(len(suffix))
        prefix, middle_suffix, middle = tokenizer.infill_ids
        suffix_ids = await tokenizer.encode_text(suffix, add_special_tokens=False)
        return self._fitting([prefix, *prefix_ids, middle_suffix, *suffix_ids, middle])

    def checked(self, token_ids: list[int]) -> list[int]:
        """Ids from the caller. Raises InvalidRequest outside of the vocabulary, PromptTooLong."""
        if max(token_ids, default=0) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"The prompt has ids outside of the vocabulary of {self.tokenizer.vocab_size}.",
                param="prompt",
            )
        return self._fitting(token_ids)

    def _refuse_hopeless(self, num_characters: int) -> None:
        """Refuse at once what cannot fit even if every token were the longest one."""
        if num_characters > self.context_length * self.tokenizer.longest_token_bytes:
            raise too_long(self.context_length)

    def _fitting(self, token_ids: list[int]) -> list[int]:
        if len(token_ids) >= self.context_length:
            raise too_long(self.context_length, len(token_ids))
        return token_ids


class Tokenizers:
    """Tokenizers by directory and revision; the least recently used one leaves first."""

    def __init__(self, *, tokenizers_max: int, concurrency: int) -> None:
        self._max = tokenizers_max
        self._gate = asyncio.Semaphore(concurrency)
        self._loaded: OrderedDict[tuple[str, str], LoadedTokenizer] = OrderedDict()
        self._loading: dict[tuple[str, str], asyncio.Task[LoadedTokenizer]] = {}

    async def get(self, model: HostedModel) -> LoadedTokenizer:
        """The tokenizer of `model`; concurrent first uses share one load."""
        key = (model.path, model.revision)
        found = self._loaded.get(key)
        if found is not None:
            self._loaded.move_to_end(key)
            return found
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, model))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        # NOTE: shielded, because the first caller may leave while others wait.
        return await asyncio.shield(task)

    async def _load(self, key: tuple[str, str], model: HostedModel) -> LoadedTokenizer:
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(model.path))
        # Asked here, so that no request pays for going through the vocabulary.
        await asyncio.to_thread(getattr, tokenizer, "longest_token_bytes")
        pooling = await asyncio.to_thread(read_pooling, Path(model.path))
        loaded = LoadedTokenizer(tokenizer, model.context_length, self._gate, pooling)
        self._loaded[key] = loaded
        while len(self._loaded) > self._max:
            self._loaded.popitem(last=False)
        return loaded
