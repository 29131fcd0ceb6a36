"""Reading a request's body: bounded in bytes and time, then strict JSON.

msgspec refuses NaN, Infinity, 1e999, lone surrogates, broken UTF-8 and trailing bytes; its
recursion is bounded by the interpreter's own limit.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request

from api.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding
from api.schemas.base import RequestBody
from api.settings import ApiSettings

Body = TypeVar("Body", bound=RequestBody)

OBJECTS_AT_ONCE = 2_000
"""Validating an object takes some 8 µs: so many in a body delay other streams by 16 ms."""


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The raw body. Raises BodyTooLarge, UnsupportedEncoding, or InvalidRequest when too slow."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding("Send the body without a content-encoding.", encoding=encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > settings.body_drain_bytes_max:
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _collect(request, settings)
    except TimeoutError:
        raise InvalidRequest("The body took too long to arrive.") from None


async def _collect(request: Request, settings: ApiSettings) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes > settings.body_drain_bytes_max:
            break
        if num_bytes <= settings.body_bytes_max:
            pieces.append(piece)
        else:
            # Read on and forget: a client that is cut off in mid-body sees a broken pipe
            # instead of the answer.
            pieces.clear()
    if num_bytes > settings.body_bytes_max:
        raise _too_large(settings)
    return b"".join(pieces)


def _too_large(settings: ApiSettings) -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than {settings.body_bytes_max} bytes.")


def parse_json(body: bytes) -> object:
    """Strict JSON. Raises InvalidRequest and repeats nothing of the body."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        reason = _other_words(body) or str(error)
        raise InvalidRequest(f"The body holds a number that is out of range: {reason}.") from None
    except msgspec.DecodeError as error:
        reason = "it is empty" if not body else str(error)
        if "surrogate in string" in (other := _other_words(body)):
            reason = other  # msgspec calls half of a character at the end of a text truncated data
        raise InvalidRequest(f"The body is not valid JSON: {reason}.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _other_words(body: bytes) -> str:
    """What orjson says is wrong, with the line and the column; empty where it finds nothing."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return str(error)
    return ""


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest."""
    content = parse_json(body)
    if not isinstance(content, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return content


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A JSON object that is not validated yet."""

    content: dict[str, Any]
    num_objects_max: int
    """Objects in it, and braces in its texts."""

    async def validated(self, schema: type[Body]) -> Body:
        """The body as `schema`; in a thread where that takes long. Raises as `read_json` does."""
        if self.num_objects_max <= OBJECTS_AT_ONCE:
            return schema.model_validate(self.content)
        return await asyncio.to_thread(schema.model_validate, self.content)


async def read_object(request: Request, settings: ApiSettings) -> ParsedBody:
    """The body as a JSON object. Raises what `read_body` and `parse_object` raise."""
    body = await read_body(request, settings)
    return ParsedBody(parse_object(body), body.count(b"{"))


async def read_json(request: Request, schema: type[Body], settings: ApiSettings) -> Body:
    """The body as `schema`, validated completely.

    Raises InvalidRequest or pydantic's ValidationError; `api.errors` answers both with 400.
    """
    return await (await read_object(request, settings)).validated(schema)
