"""The API's OpenAPI document as a page wants it: operations by group, their fields as rows."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

HIDDEN_TAGS = frozenset({"administration", "service"})
"""Not for customers."""


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter, or a field of a body."""

    name: str
    kind: str
    is_required: bool
    bounds: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A status that is not 200."""

    status: str
    text: str
    code: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of an address."""

    method: str
    path: str
    title: str
    text: str
    is_open: bool
    """It needs no key."""
    parameters: list[Field]
    body: list[Field]
    request: str
    """An example of its body; may be empty."""
    answer: str
    stream: str
    failures: list[Failure]

    @property
    def anchor(self) -> str:
        """Its name in the page's address."""
        name = self.path.removeprefix("/v1").replace("/", "-").replace("{", "").replace("}", "")
        return f"{self.method.lower()}{name}"


@dataclass(frozen=True, slots=True)
class Group:
    """The operations of one tag."""

    name: str
    text: str
    operations: list[Operation]


def groups(document: Schema) -> list[Group]:
    """Every group that is meant for customers, in the document's order."""
    read = _Reader(document)
    found = []
    for tag in document.get("tags", []):
        if tag["name"] not in HIDDEN_TAGS:
            operations = list(read.operations(tag["name"]))
            found.append(Group(tag["name"], tag["description"], operations))
    return found


class _Reader:
    """Follows references inside one document."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def operations(self, tag: str) -> Iterator[Operation]:
        for path, methods in self._document["paths"].items():
            for method, described in methods.items():
                if tag in described.get("tags", ()):
                    yield self._operation(method.upper(), path, described)

    def _operation(self, method: str, path: str, described: Schema) -> Operation:
        body = described.get("requestBody", {}).get("content", {}).get("application/json", {})
        answers: Schema = next(
            told.get("content", {})
            for status, told in described["responses"].items()
            if status.startswith("2")
        )
        return Operation(
            method=method,
            path=path,
            title=described.get("summary", path),
            text=described.get("description", ""),
            is_open=described.get("security") == [],
            parameters=[self._parameter(one) for one in described.get("parameters", ())],
            body=self._fields(body.get("schema", {})),
            request=_shown(body.get("example")),
            answer=_shown(answers.get("application/json", {}).get("example")),
            stream=answers.get("text/event-stream", {}).get("example", "").strip(),
            failures=[
                _failure(status, told)
                for status, told in described["responses"].items()
                if not status.startswith("2")
            ],
        )

    def _parameter(self, told: Schema) -> Field:
        schema = told.get("schema", {})
        return Field(
            told["name"],
            self._kind(schema),
            told.get("required", False),
            _bounds(schema),
            told.get("description", ""),
        )

    def _fields(self, schema: Schema) -> list[Field]:
        schema = self._resolved(schema)
        required = set(schema.get("required", ()))
        return [
            Field(name, self._kind(one), name in required, _bounds(one), one.get("description", ""))
            for name, one in schema.get("properties", {}).items()
        ]

    def _resolved(self, schema: Schema) -> Schema:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self._document["components"]["schemas"][name] if name else schema

    def _kind(self, schema: Schema) -> str:
        if "$ref" in schema:
            return self._kind(self._resolved(schema))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                kinds = [self._kind(one) for one in schema[word] if one.get("type") != "null"]
                return " or ".join(dict.fromkeys(kinds))
        if "const" in schema:
            return json.dumps(schema["const"])
        if "enum" in schema:
            return " | ".join(json.dumps(value) for value in schema["enum"])
        kind = schema.get("type", "any")
        if kind == "array":
            return f"list of {self._kind(schema.get('items', {}))}"
        return str(kind)


def _bounds(schema: Schema) -> str:
    """What a value is limited to, and what it is when nothing is said."""
    options = [schema, *schema.get("anyOf", ())]
    words = []
    for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤")):
        value = next((one[name] for one in options if name in one), None)
        if value is not None and abs(value) < 2**31 - 1:
            words.append(f"{sign} {value:g}")
    if (default := schema.get("default")) not in (None, [], {}):
        words.append(f"default {json.dumps(default)}")
    return ", ".join(words)


def _failure(status: str, told: Schema) -> Failure:
    example = told.get("content", {}).get("application/json", {}).get("example", {})
    return Failure(status, told.get("description", ""), example.get("error", {}).get("code") or "")


def _shown(example: object) -> str:
    return "" if example is None else json.dumps(example, indent=2, ensure_ascii=False)
