"""Calls between markers: Hermes and Qwen, Mistral, DeepSeek.

Text that only looks like a call (no JSON, or a function that nobody defined) is said as text.
"""

from api.outputs.json_call import read_call_object, stream_value
from api.outputs.source import Parsing, Source

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
NAME_LENGTH_MAX = 256


def _ignore(text: str) -> None:
    """White space and decoration around a call."""


def read_hermes(source: Source) -> Parsing[None]:
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, any number of them."""
    while True:
        source.forget()
        marker = yield from source.until([TOOL_CALL], source.say)
        if marker is None:
            return
        source.rewind(len(marker))
        source.remember()
        yield from source.accepts(marker)
        if (yield from read_call_object(source)):
            yield from source.until([END_TOOL_CALL], _ignore)
        else:
            source.say_remembered()


def read_mistral(source: Source) -> Parsing[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]f[ARGS]{…}` one by one."""
    while True:
        source.forget()
        marker = yield from source.until([TOOL_CALLS], source.say)
        if marker is None:
            return
        source.rewind(len(marker))
        source.remember()
        yield from source.accepts(marker)
        yield from source.skip_space()
        if (yield from source.peek()) == "[":
            is_call = yield from read_call_list(source)
        else:
            is_call = yield from _read_named(source, [ARGS, CALL_ID, "{"])
        if not is_call:
            source.say_remembered()


def read_call_list(source: Source) -> Parsing[bool]:
    """A JSON list of call objects; also what a grammar forces a model to write."""
    yield from source.skip_space()
    if not (yield from source.accepts("[")):
        return False
    num_before = source.num_calls
    while (yield from read_call_object(source)):
        yield from source.skip_space()
        if not (yield from source.accepts(",")):
            yield from source.accepts("]")
            return True
    return source.num_calls > num_before


def read_deepseek(source: Source) -> Parsing[None]:
    """Calls between `<｜tool▁calls▁begin｜>` and its end, with or without the older ```json fence."""
    while True:
        source.forget()
        marker = yield from source.until([CALL_BEGIN, CALLS_BEGIN, CALLS_END], source.say)
        if marker is None:
            return
        if marker != CALL_BEGIN:
            continue
        source.rewind(len(marker))
        source.remember()
        yield from source.accepts(marker)
        if (yield from source.accepts(f"function{SEPARATOR}")):
            is_call = yield from _read_named(source, ["\n```json", "{"])
        else:
            is_call = yield from _read_named(source, [SEPARATOR])
        if is_call:
            yield from source.until([CALL_END], _ignore)
        else:
            source.say_remembered()


def _read_named(source: Source, markers: list[str]) -> Parsing[bool]:
    """A bare name, one of `markers`, and the arguments as a JSON object."""
    name = ""
    while not (marker := (yield from _first_accepted(source, markers))):
        character = yield from source.next()
        name += character
        if not character or len(name) > NAME_LENGTH_MAX:
            return False
    if not source.knows(name.strip()):
        return False
    if marker == CALL_ID:
        yield from source.until([ARGS, "{"], _ignore)
        marker = ARGS
    if marker == "{":
        source.rewind(1)
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        return False
    source.forget()
    source.call(name.strip())
    yield from stream_value(source)
    source.call_ends()
    return True


def _first_accepted(source: Source, markers: list[str]) -> Parsing[str]:
    for marker in markers:
        if (yield from source.accepts(marker)):
            return marker
    return ""
