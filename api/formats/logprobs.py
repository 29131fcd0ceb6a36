"""Log-probabilities in OpenAI's two forms."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from api.choices import ShownToken
from api.scores import LegacyLogprobs


def token_string(token: bytes) -> str:
    """A token as text; half a character as `bytes:\\xf0\\x9f`, the way OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """`{token, logprob, bytes}` of the chat form."""
    return {"token": token_string(token), "logprob": logprob, "bytes": list(token)}


def chat_logprobs(tokens: Iterable[ShownToken]) -> list[dict[str, Any]]:
    """One entry a token, with the most likely ones in its place."""
    return [
        chat_logprob(shown.token, shown.logprob)
        | {"top_logprobs": [chat_logprob(token, value) for token, value in shown.top]}
        for shown in tokens
    ]


def legacy_logprobs(tokens: Sequence[ShownToken], start: int) -> LegacyLogprobs:
    """The older form; `start` is the text offset of the first token.

    A token that only completes a character stands behind it.
    """
    found = LegacyLogprobs()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for shown in tokens:
        top = {token_string(token): value for token, value in shown.top}
        found.append(token_string(shown.token), shown.logprob, top, start)
        start += len(decoder.decode(shown.token))
    return found
