"""OpenAI's `response`, whole and as typed events over its items.

Their accumulator raises for a repeated output index, or another response id, so an item's place
never changes: items open in the order in which they begin.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from api.choices import Piece
from api.errors import ErrorAnswer
from api.formats.base import AnswerHead, encode
from api.formats.logprobs import chat_logprobs
from api.outputs.deltas import CallDelta, Delta, ReasoningDelta, TextDelta, chunks, merged
from api.shortage import Cut, Pause
from api.summary import Summary
from common.ids import new_id

Object = dict[str, Any]


class ResponsesFormat:
    """Items of reasoning, text and calls, one open at a time."""

    def __init__(self, head: AnswerHead, echo: Mapping[str, Any]) -> None:
        """`echo`: the parameters that the object repeats."""
        self._head = head
        self._echo = dict(echo)
        self._sequence_number = 0
        self._items: list[Object] = []
        self._open: tuple[type[Delta], int] | None = None
        self._is_cut = False
        self._cut: Cut | None = None
        """Why, where it is not the caller's limit."""

    def opening(self, num_cached_tokens: int) -> bytes:
        """`response.created` and `response.in_progress`."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def add(self, piece: Piece) -> bytes:
        """Deltas of items; an item opens where the kind of output changes."""
        tokens = chat_logprobs(piece.tokens)
        payload = b""
        for delta in chunks(piece.deltas):
            payload += self._delta(delta, tokens if isinstance(delta, TextDelta) else [])
            tokens = [] if isinstance(delta, TextDelta) else tokens
        if piece.finish_reason is not None:
            self._is_cut, self._cut = piece.finish_reason == "length", piece.cut
            payload += self._close_item()
        return payload

    def paused(self, pause: Pause, choice: int) -> bytes:
        """`response.in_progress` again, whose response says what it waits for."""
        response = self._response("in_progress") | {"paused": pause.as_json()}
        return self._event("response.in_progress", response=response)

    def closing(self, summary: Summary) -> bytes:
        """`response.completed` or `response.incomplete`, with the usage."""
        status = "incomplete" if self._is_cut else "completed"
        return self._event(f"response.{status}", response=self._response(status, summary))

    def failing(self, error: ErrorAnswer) -> bytes:
        """`response.failed`, and the `error` event, which their SDKs raise."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("response.failed", response=response) + self._event("error", **told)

    def whole(self, pieces: Sequence[Piece], summary: Summary) -> bytes:
        """The `response` object."""
        (piece,) = pieces
        self._is_cut, self._cut = piece.finish_reason == "length", piece.cut
        tokens = chat_logprobs(piece.tokens)
        for delta in merged(piece.deltas):
            item = _new_item(delta)
            _fill(item, delta, tokens if isinstance(delta, TextDelta) else [])
            tokens = [] if isinstance(delta, TextDelta) else tokens
            self._items.append(item | {"status": self._last_status()})
        status = "incomplete" if self._is_cut else "completed"
        return encode(self._response(status, summary))

    # items

    def _delta(self, delta: Delta, logprobs: list[Object]) -> bytes:
        payload = b""
        key = (type(delta), delta.index if isinstance(delta, CallDelta) else 0)
        if self._open != key:
            payload = self._close_item() + self._open_item(delta)
            self._open = key
        item = self._items[-1]
        _fill(item, delta, logprobs)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if isinstance(delta, TextDelta):
            told = {"content_index": 0, "delta": delta.text, "logprobs": logprobs}
            return payload + self._event("response.output_text.delta", **place, **told)
        if isinstance(delta, ReasoningDelta):
            told = {"content_index": 0, "delta": delta.text}
            return payload + self._event("response.reasoning_text.delta", **place, **told)
        if not delta.arguments:
            return payload
        kind = "response.function_call_arguments.delta"
        return payload + self._event(kind, **place, delta=delta.arguments)

    def _open_item(self, delta: Delta) -> bytes:
        item = _new_item(delta)
        self._items.append(item)
        index = len(self._items) - 1
        shown = item | ({"content": []} if "content" in item else {})
        payload = self._event("response.output_item.added", output_index=index, item=shown)
        if isinstance(delta, TextDelta):
            payload += self._event(
                "response.content_part.added",
                item_id=item["id"],
                output_index=index,
                content_index=0,
                part=_text_part("", []),
            )
        return payload

    def _close_item(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        item = self._items[-1]
        item["status"] = self._last_status()
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        payload = b""
        if kind is TextDelta:
            (part,) = item["content"]
            at = place | {"content_index": 0}
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            payload += self._event("response.output_text.done", **at, **told)
            payload += self._event("response.content_part.done", **at, part=part)
        elif kind is ReasoningDelta:
            told = {"content_index": 0, "text": item["content"][0]["text"]}
            payload += self._event("response.reasoning_text.done", **place, **told)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            payload += self._event("response.function_call_arguments.done", **place, **told)
        return payload + self._event("response.output_item.done", output_index=index, item=item)

    def _last_status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    # the object

    def _event(self, kind: str, **content: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._sequence_number} | content
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(told))

    def _response(self, status: str, summary: Summary | None = None) -> Object:
        details: Object | None = None
        if status == "incomplete":
            details = {"reason": "max_output_tokens"}
            details |= {} if self._cut is None else self._cut.as_json()
        return self._echo | {
            "id": self._head.response_id,
            "object": "response",
            "created_at": self._head.created_s,
            "completed_at": None if status == "in_progress" else self._head.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self._head.model,
            "output": self._items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if summary is None else _usage(summary),
            "timing": None if summary is None else summary.timing(),
        }


def _new_item(delta: Delta) -> Object:
    if isinstance(delta, TextDelta):
        part = _text_part("", [])
        kind = {"type": "message", "role": "assistant", "content": [part]}
        return {"id": new_id("msg"), "status": "in_progress"} | kind
    if isinstance(delta, ReasoningDelta):
        part = {"type": "reasoning_text", "text": ""}
        kind = {"type": "reasoning", "summary": [], "content": [part]}
        return {"id": new_id("rs"), "status": "in_progress"} | kind
    call = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
    return {"id": new_id("fc"), "status": "in_progress"} | call


def _fill(item: Object, delta: Delta, logprobs: list[Object]) -> None:
    """Add what `delta` says to its item."""
    if isinstance(delta, CallDelta):
        item["arguments"] += delta.arguments
        return
    (part,) = item["content"]
    part["text"] += delta.text
    if isinstance(delta, TextDelta):
        part["logprobs"] = [*part["logprobs"], *logprobs]


def _text_part(text: str, logprobs: list[Object]) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(summary: Summary) -> Object:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": summary.reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    } | summary.money()
