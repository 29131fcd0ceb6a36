"""The JSON inside of calls: one value streamed as it grows, and the object that names a function.

Most families write `{"name": "…", "arguments": {…}}`; Llama says `parameters`. The name usually
comes first, so the arguments can leave as they are written.
"""

import json

from api.outputs.source import Parsing, Source

ARGUMENTS = ("arguments", "parameters")
KNOWN_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENTS})
"""An object with other keys is not a call but an answer in JSON."""
NO_ARGUMENTS = "{}"


def stream_value(source: Source) -> Parsing[None]:
    """Read one JSON value; its characters become arguments as they come."""
    scanner = Scanner()
    held = ""
    while character := (yield from source.next()):
        if scanner.ends_before(character):
            source.rewind(1)
            return
        # White space is said only when something follows it, so that none trails the value.
        held += character
        if not character.isspace():
            source.argue(held)
            held = ""
        if scanner.add(character):
            return


def read_value(source: Source) -> Parsing[str]:
    """One JSON value as text, unchecked; what there is of it at the end."""
    scanner = Scanner()
    text = ""
    while character := (yield from source.next()):
        if scanner.ends_before(character):
            source.rewind(1)
            break
        text += character
        if scanner.add(character):
            break
    return text.strip()


class Scanner:
    """Knows where a JSON value ends: counts brackets, and skips strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def ends_before(self, character: str) -> bool:
        """Whether a number, true, false or null ends before `character`, which is not its own."""
        return self._depth == 0 and not self._is_string and character in ",}]"

    def add(self, character: str) -> bool:
        """Whether the value is complete with `character`."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_string = False
                return self._depth == 0
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def read_call_object(source: Source) -> Parsing[bool]:
    """Read one object that calls a function.

    False where it is none, or calls what is not there; the caller remembers the text and says it.
    """
    yield from source.skip_space()
    if not (yield from source.accepts("{")):
        return False
    call = _Call(source)
    while True:
        yield from source.skip_space()
        if (yield from source.accepts("}")):
            return call.end()
        if (yield from source.accepts(",")):
            continue
        key = _string((yield from read_value(source)))
        yield from source.skip_space()
        if key not in KNOWN_KEYS or not (yield from source.accepts(":")):
            # The text ended, or this is not a call: what has begun stays begun.
            return call.has_begun
        yield from source.skip_space()
        if not (yield from call.read(key)):
            return call.has_begun


class _Call:
    """The keys of the object so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._waiting: str | None = None
        """Arguments that came before the name."""
        self.has_begun = False
        self._has_arguments = False

    def read(self, key: str) -> Parsing[bool]:
        """Read the value of `key`; False where it shows that this is no call."""
        source = self._source
        if key == "name":
            return self._begin(_string((yield from read_value(source))))
        if key not in ARGUMENTS:
            yield from read_value(source)
        elif not self.has_begun:
            self._waiting = yield from read_value(source)
        elif (yield from source.peek()) == '"':
            self._argue_text((yield from read_value(source)))
        else:
            yield from stream_value(source)
            self._has_arguments = True
        return True

    def end(self) -> bool:
        """The object is complete."""
        if self.has_begun:
            if not self._has_arguments:
                self._source.argue(NO_ARGUMENTS)
            self._source.call_ends()
        return self.has_begun

    def _begin(self, name: str | None) -> bool:
        if name is None or self.has_begun or not self._source.knows(name):
            return False
        self._source.forget()
        self._source.call(name)
        self.has_begun = True
        if self._waiting is not None:
            self._argue_text(self._waiting)
        return True

    def _argue_text(self, value: str) -> None:
        """Some models write the arguments' JSON inside of a string."""
        inner = _string(value)
        self._source.argue(value if inner is None else inner)
        self._has_arguments = True


def _string(text: str) -> str | None:
    """What a JSON string says; None for anything else."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
