"""The form that an answer must have: `response_format`, and the calls that `tool_choice` forces.

Checked here for what would be hostile or could not be promised, compiled by the worker. What the
grammar cannot guarantee is refused where the caller said `strict`, and ignored elsewhere.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from api.conversation import TOOLS_LENGTH_MAX, ToolUse
from api.errors import InvalidRequest
from api.schemas.base import RequestBody
from engine.messages import Structure

SOURCE_LENGTH_MAX = 65_536
DEPTH_MAX = 64
"""Levels of a schema. Compiling takes 0.1 s at 50 levels of objects and 20 s at 400."""
PATTERN_LENGTH_MAX = 2_048
PATTERN_DEPTH_MAX = 50
NUM_FORCED_CALLS_MAX = 16
ANY_OBJECT = '{"type": "object"}'
NOT_GUARANTEED = frozenset(
    {"not", "if", "then", "else", "contains", "uniqueItems", "dependentRequired"}
    | {"dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
)
SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

SchemaSource = Annotated[str, Field(min_length=1, max_length=SOURCE_LENGTH_MAX)]


class NamedSchema(RequestBody):
    """The schema of a `json_schema` format."""

    name: str = Field(default="", max_length=256)
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class PlainFormat(RequestBody):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(RequestBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(RequestBody):
    """Text that matches a regular expression as a whole."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, max_length=PATTERN_LENGTH_MAX)


class GrammarFormat(RequestBody):
    """Text that a context-free grammar in GBNF produces; its first rule is `root`."""

    type: Literal["grammar"]
    grammar: SchemaSource


def _format_branch(content: Any) -> str:
    kind = content.get("type") if isinstance(content, dict) else None
    known = {"json_schema": "<schema>", "regex": "<regex>", "grammar": "<grammar>"}
    return known.get(str(kind), "<plain>")


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")]
    | Annotated[SchemaFormat, Tag("<schema>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(_format_branch),
]


def structure_of(wanted: ResponseFormat | None, use: ToolUse) -> Structure | None:
    """What the worker is to enforce. Raises InvalidRequest for what it could not."""
    for number, tool in enumerate(use.tools):
        is_promised = tool.is_strict and use.choice != "none"
        check_schema(tool.parameters, f"tools[{number}]", is_strict=is_promised)
    if use.choice == "required":
        if wanted is not None and wanted.type != "text":
            raise InvalidRequest(
                "'response_format' and a 'tool_choice' that forces a call exclude each other.",
                param="response_format",
            )
        return forced_calls(use)
    match wanted:
        case SchemaFormat(json_schema=given):
            schema = given.schema_
            check_schema(schema, "response_format.json_schema.schema", is_strict=given.strict)
            return Structure("json_schema", json.dumps(schema))
        case RegexFormat(pattern=pattern):
            check_pattern(pattern, "response_format.pattern")
            return Structure("regex", pattern)
        case GrammarFormat(grammar=grammar):
            check_pattern(grammar, "response_format.grammar")
            return Structure("ebnf", grammar)
        case PlainFormat(type="json_object"):
            return Structure("json_schema", ANY_OBJECT)
    return None


def forced_calls(use: ToolUse) -> Structure:
    """A JSON list of calls, of one of the tools that are offered."""
    calls = []
    definitions: dict[str, Any] = {}
    for number, tool in enumerate(use.offered):
        place = f"tool_{number}"
        definitions[place] = _moved(tool.schema, f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": NUM_FORCED_CALLS_MAX if use.is_parallel else 1,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }
    source = json.dumps(schema)
    if len(source) > TOOLS_LENGTH_MAX:
        raise InvalidRequest("The tools are too long to force a call of them.", param="tools")
    return Structure("json_schema", source)


def _moved(schema: Any, root: str) -> Any:
    """The same schema at another place: references to its own parts begin at `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def check_schema(schema: Mapping[str, Any], param: str, *, is_strict: bool) -> None:
    """Raise InvalidRequest for a schema that is too big, malformed, or cannot be guaranteed."""
    for place, depth in _levels(schema):
        if depth > DEPTH_MAX:
            raise InvalidRequest(f"The schema has more than {DEPTH_MAX} levels.", param=param)
        _check_level(place, param, is_strict=is_strict)
    if len(json.dumps(schema)) > SOURCE_LENGTH_MAX:
        raise InvalidRequest(f"The schema is longer than {SOURCE_LENGTH_MAX}.", param=param)


def _check_level(level: Mapping[str, Any], param: str, *, is_strict: bool) -> None:
    kinds = level.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        # A property may be called `type`: then its value is a schema.
        if isinstance(kind, str) and kind not in SCHEMA_TYPES:
            raise InvalidRequest(f"The schema has an unknown type '{kind[:50]}'.", param=param)
    reference = level.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise InvalidRequest("The schema refers to something outside of itself.", param=param)
    if isinstance(pattern := level.get("pattern"), str):
        check_pattern(pattern, param)
    if is_strict:
        found = sorted(NOT_GUARANTEED & level.keys())
        if isinstance(level.get("allOf"), list) and len(level["allOf"]) > 1:
            found.append("allOf")
        if found:
            raise InvalidRequest(
                f"'{found[0]}' cannot be guaranteed by a strict schema.", param=param
            )


def _levels(schema: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Every object of a schema, with its level; not recursive, however deep it is."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        place, depth = waiting.pop()
        if isinstance(place, Mapping):
            yield place, depth
            waiting += [(value, depth + 1) for value in place.values()]
        elif isinstance(place, list):
            waiting += [(item, depth + 1) for item in place]


def check_pattern(pattern: str, param: str) -> None:
    """Raise InvalidRequest for brackets nested so deeply that a compiler might fail on them."""
    depth = deepest = 0
    for character in pattern:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > PATTERN_DEPTH_MAX:
        raise InvalidRequest("The pattern is nested too deeply.", param=param)
