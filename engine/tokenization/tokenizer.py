"""A model's tokenizer, loaded from its directory."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelRefused, TemplateRejected
from engine.tokenization.chat_template import ChatTemplate
from engine.tokenization.token_bytes import TokenBytes

SHORT_TEXT_CHARACTERS = 4_096
"""Below, encoding takes about a millisecond and a hop to another thread costs more than it saves.

Above, `async_encode` must be used: plain `encode` holds the GIL for the whole call (420 of 424 ms
measured on 700 KB) and would stall every stream of the process.
"""

INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)
"""What families that can fill in the middle of a text call their control tokens."""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


class Tokenizer:
    """Text to ids and back. Safe to share between requests."""

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        *,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tokenizer_config: dict[str, Any],
        template_source: str | None,
    ) -> None:
        fast.no_padding()
        fast.no_truncation()
        self._fast = fast
        self._bytes = TokenBytes(fast)
        added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        named = {
            name: text
            for name in SPECIAL_TOKEN_NAMES
            if (text := _token_text(tokenizer_config.get(name))) is not None
        }
        text_config = config.get("text_config", config)
        self.vocab_size: int = text_config.get("vocab_size") or fast.get_vocab_size()
        self.context_length: int | None = text_config.get("max_position_embeddings")
        self.eos_token_ids = self._eos_token_ids(
            [generation_config.get("eos_token_id"), text_config.get("eos_token_id")],
            named.get("eos_token"),
        )
        texts = [added[token_id].content for token_id in self.special_token_ids]
        self.infill_ids = self._infill_ids({t.content: token_id for token_id, t in added.items()})
        """Control tokens before the prefix, the suffix and the middle; None: it cannot infill."""
        self._template = None
        if template_source is not None:
            self._template = ChatTemplate(template_source, special_tokens=texts, variables=named)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the configs beside it. Raises ModelRefused without it."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(f"{directory.name} has no tokenizer.json", directory=str(directory))
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        return cls(
            tokenizers.Tokenizer.from_file(str(path)),
            config=_read_json(directory / "config.json"),
            generation_config=_read_json(directory / "generation_config.json"),
            tokenizer_config=tokenizer_config,
            template_source=_template_source(directory, tokenizer_config),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template as it is written; empty where there is none."""
        return self._template.source if self._template is not None else ""

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[int]:
        """A conversation as ids, in the model's own layout. Raises TemplateRejected."""
        if self._template is None:
            raise TemplateRejected("This model has no chat template; use /v1/completions.")
        pieces = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **template_variables
        )
        if len(pieces) == 1:
            return await self.encode_text(pieces[0], add_special_tokens=False)
        return await self._encode_pieces(pieces)

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`text` as ids; `add_special_tokens` adds what the model begins every text with."""
        if len(text) <= SHORT_TEXT_CHARACTERS:
            encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = await self._fast.async_encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def encode_whole(
        self, texts: Sequence[str | tuple[str, str]], most: int | None = None
    ) -> list[tuple[list[int], int]]:
        """Texts or pairs as ids with special tokens, and where a pair's second text begins.

        That is 0 where the model does not tell them apart. At most `most` ids each: the end of the
        text, or of the second text, is left out.
        """
        encodings = await self._fast.async_encode_batch(list(texts), add_special_tokens=True)
        if most is not None and any(len(encoding.ids) > most for encoding in encodings):
            encodings = await self._encode_cut(texts, most)
        return [
            (encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)
            for encoding in encodings
        ]

    async def _encode_cut(self, texts: Sequence[str | tuple[str, str]], most: int) -> list[Any]:
        pairs = [each if isinstance(each, tuple) else (each, None) for each in texts]
        flat = [text for pair in pairs for text in pair if text is not None]
        bare = iter(await self._fast.async_encode_batch(flat, add_special_tokens=False))
        cut = []
        for _, second in pairs:
            kept = next(bare)
            behind = None if second is None else next(bare)
            room = most - self._fast.num_special_tokens_to_add(behind is not None)
            if behind is None:
                kept.truncate(max(0, room))
            else:
                behind.truncate(max(0, room - len(kept.ids)))
            cut.append(self._fast.post_process(kept, behind, True))
        return cut

    async def _encode_pieces(self, pieces: list[str]) -> list[int]:
        """Pieces of one text, each by itself.

        SentencePiece begins every text with a space. A piece from the middle is encoded behind a
        newline, which is then taken off again.
        """
        first, *rest = pieces
        texts = [first, "\n", *("\n" + piece for piece in rest), *rest]
        encodings = await self._fast.async_encode_batch(texts, add_special_tokens=False)
        ids: list[int] = list(encodings[0].ids)
        newline = encodings[1].ids
        behind, alone = encodings[2 : 2 + len(rest)], encodings[2 + len(rest) :]
        for with_newline, encoding in zip(behind, alone, strict=True):
            is_clean = with_newline.ids[: len(newline)] == newline
            ids += with_newline.ids[len(newline) :] if is_clean else encoding.ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The whole text of `token_ids` at once, control tokens left out."""
        text: str = self._fast.decode(token_ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> bytes:
        """The bytes that this id stands for; maybe a part of a character."""
        return self._bytes[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is `text`; None where it takes several."""
        token_id: int | None = self._fast.token_to_id(text)
        return token_id

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those `texts` that are control tokens of this model."""
        found = {self._fast.token_to_id(text) for text in texts}
        return self.special_token_ids & found

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes that one id can stand for. Goes through the vocabulary once."""
        return max(len(self.token_text(token_id)) for token_id in range(self.vocab_size))

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space before the first word."""
        return self._bytes.strips_first_space

    @staticmethod
    def _infill_ids(added: dict[str, int]) -> tuple[int, int, int] | None:
        for markers in INFILL_TOKENS:
            prefix, suffix, middle = (added.get(text) for text in markers)
            if prefix is not None and suffix is not None and middle is not None:
                return prefix, suffix, middle
        return None

    def _eos_token_ids(self, configured: list[Any], text: str | None) -> tuple[int, ...]:
        found: set[int] = set()
        for value in configured:
            if isinstance(value, int):
                found.add(value)
            elif isinstance(value, list):
                found.update(value)
        token_id = self._fast.token_to_id(text) if text is not None else None
        return tuple(sorted(found | ({token_id} if token_id is not None else set())))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    configured = tokenizer_config.get("chat_template")
    if isinstance(configured, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None
