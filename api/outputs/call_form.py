"""How a family of models writes a call, as a form: what keeps the arguments of a `strict` tool to
its schema while the model is free to call or to answer.

The text is free until the marker that begins a call; from there to the end of the call the grammar
binds. (xgrammar's structural tags: https://xgrammar.mlc.ai/docs/, "structural tag".)
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.messages import WHITESPACE_MAX

NAME = "{name}"
TokenId = Callable[[str], int | None]
"""The id of the one token that a text is; None where it takes several."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """`trigger before call (separator call)* after`; a call is `begin`, JSON arguments, `end`."""

    trigger: str
    begin: str
    """`{name}` stands for the name of the function."""
    end: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""
    """Between calls behind one trigger; empty where each call has a trigger of its own."""

    def tags(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        markers: tuple[str, ...],
        token_id: TokenId,
        *,
        is_parallel: bool,
    ) -> dict[str, Any]:
        """The structural tag for the functions of `schemas`, by name.

        Those of `markers` that are one token of the model are required as that token.
        """
        writer = _Writer(markers, token_id)
        calls = [
            [
                *writer.pieces(self.begin.replace(NAME, name)),
                _arguments(schema),
                *writer.pieces(self.end),
            ]
            for name, schema in schemas.items()
        ]
        call = {"type": "or", "elements": [_sequence(pieces) for pieces in calls]}
        more: list[dict[str, Any]] = []
        if self.separator and is_parallel:
            next_call = _sequence([*writer.pieces(self.separator), call])
            more = [{"type": "star", "content": next_call}]
        after = writer.pieces(self.after)
        begin, end = writer.pieces(self.trigger), after[-1:]
        content = _sequence([*writer.pieces(self.before), call, *more, *after[:-1]])
        is_token = begin[0]["type"] == "token"
        tag = {
            "type": "tag",
            "begin": begin[0] if is_token else self.trigger,
            "content": content,
            "end": "" if not end else end[0] if end[0]["type"] == "token" else end[0]["value"],
        }
        triggers = (
            {"type": "token_triggered_tags", "trigger_tokens": [begin[0]["token"]]}
            if is_token
            else {"type": "triggered_tags", "triggers": [self.trigger]}
        )
        choice = triggers | {"tags": [tag], "stop_after_first": not is_parallel}
        return {"type": "structural_tag", "format": choice}


@dataclass(frozen=True, slots=True)
class _Writer:
    """Texts as the grammar wants them: markers that are tokens apart from what is spelled."""

    markers: tuple[str, ...]
    token_id: TokenId

    def pieces(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        between = re.split("(" + "|".join(map(re.escape, self.markers)) + ")", text)
        return [self._piece(piece) for piece in between if piece]

    def _piece(self, text: str) -> dict[str, Any]:
        token_id = self.token_id(text) if text in self.markers else None
        if token_id is None:
            return {"type": "const_string", "value": text}
        return {"type": "token", "token": token_id}


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": WHITESPACE_MAX,
    }


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
