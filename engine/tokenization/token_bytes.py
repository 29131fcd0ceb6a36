"""The bytes behind a token id, so that text can be cut at characters and not at tokens.

Three families cover what open models use: byte-level BPE (each character of a token stands for a
byte), byte fallback (`<0xE2>` is a byte, `▁` a space), and everything else, whose tokens are text.
"""

import json
import re
from collections.abc import Callable

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

ToBytes = Callable[[str], bytes]


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for 256, 257, …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def byte_level(token: str) -> bytes:
    """A byte-level BPE token: one byte a character."""
    try:
        return bytes(BYTE_CHARACTERS[character] for character in token)
    except KeyError:  # a token that was added as text
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """A SentencePiece token: `<0xE2>` is a byte, `▁` a space, the rest text."""
    if found := BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode()


def word_piece(token: str) -> bytes:
    """A WordPiece token: `##` continues a word, anything else begins one."""
    return token[2:].encode() if token.startswith("##") else f" {token}".encode()


class TokenBytes:
    """The bytes of every id of one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        kinds = _decoder_kinds(json.loads(tokenizer.to_str())["decoder"])
        to_bytes: ToBytes = byte_fallback
        if "ByteLevel" in kinds:
            to_bytes = byte_level
        elif "WordPiece" in kinds:
            to_bytes = word_piece
        self.strips_first_space = "ByteLevel" not in kinds and bool(
            kinds & {"Strip", "Metaspace", "WordPiece"}
        )
        """Whether the space before the first word belongs to the encoding, not to the text."""
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = token.encode() if token_id in added else to_bytes(token)

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for ids that the tokenizer does not name (padding rows of the embedding)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


def _decoder_kinds(decoder: dict[str, object] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    if not isinstance(inner, list):
        return {str(decoder["type"])}
    return {kind for part in inner for kind in _decoder_kinds(part)}
