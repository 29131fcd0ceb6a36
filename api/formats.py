"""The JSON of chat and text completions, whole and in chunks.

A chunk is three byte strings joined: what is the same for the whole stream is encoded once.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from api.choices import Piece, ShownToken
from api.summary import Summary

encode = msgspec.json.encode


class Format(Protocol):
    """How one route writes the pieces of an answer."""

    def first_chunk(self, choice: int) -> bytes:
        """The event that opens a choice; may be empty."""

    def text_chunk(self, piece: Piece) -> bytes:
        """The event of new text."""

    def finish_chunk(self, piece: Piece) -> bytes:
        """The event that ends a choice."""

    def usage_chunk(self, summary: Summary) -> bytes:
        """The event of the usage, with no choices."""

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The answer that is not streamed; `pieces` are the complete choices in order."""


class ChunkFrame:
    """The constant head and tail of every chunk of one stream."""

    def __init__(
        self, *, response_id: str, kind: str, created_s: int, model: str, include_usage: bool
    ) -> None:
        self._envelope = {
            "id": response_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + encode(self._envelope)[:-1] + b',"choices":['
        # OpenAI: when usage is asked for, every chunk but the last has it as null.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def choice(self, choice: bytes) -> bytes:
        """A chunk of one choice."""
        return self._head + choice + self._tail

    def usage(self, summary: Summary) -> bytes:
        """The last chunk: usage and timing, no choices."""
        told = {"choices": [], "usage": summary.usage(), "timing": summary.timing()}
        return b"data: " + encode(self._envelope | told) + b"\n\n"


class ChatFormat:
    """`chat.completion` and its chunks."""

    def __init__(
        self,
        *,
        response_id: str,
        created_s: int,
        model: str,
        include_usage: bool,
        has_logprobs: bool,
    ) -> None:
        self._head = {"id": response_id, "created": created_s, "model": model}
        self._has_logprobs = has_logprobs
        self._chunks = ChunkFrame(
            response_id=response_id,
            kind="chat.completion.chunk",
            created_s=created_s,
            model=model,
            include_usage=include_usage,
        )

    def first_chunk(self, choice: int) -> bytes:
        """The role comes first and once."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._chunks.choice(b'{"index":%d,' % choice + delta)

    def text_chunk(self, piece: Piece) -> bytes:
        """New text of one choice."""
        logprobs = encode(self._logprobs(piece.tokens)) if piece.tokens else b"null"
        return self._chunks.choice(
            b'{"index":%d,"delta":{"content":' % piece.choice
            + encode(piece.text)
            + b'},"logprobs":'
            + logprobs
            + b',"finish_reason":null}'
        )

    def finish_chunk(self, piece: Piece) -> bytes:
        """The end of one choice."""
        return self._chunks.choice(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}'
            % (piece.choice, str(piece.finish_reason).encode())
        )

    def usage_chunk(self, summary: Summary) -> bytes:
        """The usage, when it was asked for."""
        return self._chunks.usage(summary)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `chat.completion` object."""
        choices = [
            {
                "index": piece.choice,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece.tokens) if self._has_logprobs else None,
                "finish_reason": piece.finish_reason,
            }
            for piece in pieces
        ]
        told = {"object": "chat.completion", "system_fingerprint": None, "choices": choices}
        return encode(self._head | told | {"usage": summary.usage(), "timing": summary.timing()})

    def _logprobs(self, tokens: Iterable[ShownToken]) -> dict[str, Any]:
        content = [
            chat_logprob(shown.token, shown.logprob)
            | {"top_logprobs": [chat_logprob(token, value) for token, value in shown.top]}
            for shown in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionFormat:
    """`text_completion`, whole and in chunks, which have the same name."""

    def __init__(
        self,
        *,
        response_id: str,
        created_s: int,
        model: str,
        include_usage: bool,
        has_logprobs: bool,
    ) -> None:
        self._head = {"id": response_id, "created": created_s, "model": model}
        self._has_logprobs = has_logprobs
        self._offsets: dict[int, int] = {}
        self._chunks = ChunkFrame(
            response_id=response_id,
            kind="text_completion",
            created_s=created_s,
            model=model,
            include_usage=include_usage,
        )

    def first_chunk(self, choice: int) -> bytes:
        """Nothing: there is no role."""
        return b""

    def text_chunk(self, piece: Piece) -> bytes:
        """New text of one choice."""
        return self._chunks.choice(encode(self._choice(piece) | {"finish_reason": None}))

    def finish_chunk(self, piece: Piece) -> bytes:
        """The end of one choice."""
        ended = Piece(piece.choice, "", (), piece.finish_reason)
        return self._chunks.choice(encode(self._choice(ended)))

    def usage_chunk(self, summary: Summary) -> bytes:
        """The usage, when it was asked for."""
        return self._chunks.usage(summary)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `text_completion` object."""
        choices = [self._choice(piece) for piece in pieces]
        told = {"object": "text_completion", "system_fingerprint": None, "choices": choices}
        return encode(self._head | told | {"usage": summary.usage(), "timing": summary.timing()})

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs and (piece.tokens or piece.text):
            start = self._offsets.get(piece.choice, 0)
            logprobs = legacy_logprobs(piece.tokens, start)
            self._offsets[piece.choice] = start + sum(map(len, logprobs["tokens"]))
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


def token_string(token: bytes) -> str:
    """A token as text; half a character as `bytes:\\xf0\\x9f`, the way OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """`{token, logprob, bytes}` of the chat form."""
    return {"token": token_string(token), "logprob": logprob, "bytes": list(token)}


def legacy_logprobs(tokens: Sequence[ShownToken], start: int) -> dict[str, Any]:
    """The four parallel lists of the older form; `start` is the text offset of the first token."""
    texts = [token_string(shown.token) for shown in tokens]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [shown.logprob for shown in tokens],
        "top_logprobs": [
            {token_string(token): value for token, value in shown.top} for shown in tokens
        ],
        "text_offset": offsets,
    }
