"""Calls that are the whole answer and have no markers of their own: Llama's JSON, and pythonic.

Nothing is shown until it is clear whether the answer is a call: with JSON that is the name of the
function, which comes first.
"""

import ast
import json
from typing import Any

from api.outputs.json_call import read_call_object
from api.outputs.source import Parsing, Source

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
CALL_LENGTH_MAX = 65_536


def read_llama(source: Source) -> Parsing[None]:
    """`{"name": "f", "parameters": {…}}`, several separated by semicolons, maybe behind a tag."""
    source.remember()
    yield from source.skip_space()
    yield from source.accepts(PYTHON_TAG)
    while (yield from read_call_object(source)):
        yield from source.skip_space()
        yield from source.accepts(";")
        source.remember()
        yield from source.skip_space()
        yield from source.accepts(PYTHON_TAG)
    source.say_remembered()
    yield from say_rest(source)


def read_pythonic(source: Source) -> Parsing[None]:
    """`[f(x=1), g(y="s")]`: Llama 4 and others."""
    source.remember()
    yield from source.skip_space()
    yield from source.accepts(PYTHON_START)
    if (yield from source.accepts("[")):
        while (yield from _read_python_call(source)):
            source.remember()
            yield from source.skip_space()
            if not (yield from source.accepts(",")):
                yield from source.accepts("]")
                yield from source.accepts(PYTHON_END)
                source.forget()
                source.remember()
                break
            yield from source.skip_space()
    source.say_remembered()
    yield from say_rest(source)


def say_rest(source: Source) -> Parsing[None]:
    """All that follows is the answer."""
    yield from source.until([], source.say)


def _read_python_call(source: Source) -> Parsing[bool]:
    """One `f(x=1)`; it is said as a whole, when its last bracket has come."""
    name = yield from _read_name(source)
    if not source.knows(name) or not (yield from source.accepts("(")):
        return False
    text = "("
    depth, quote = 1, ""
    while depth:
        character = yield from source.next()
        text += character
        if not character or len(text) > CALL_LENGTH_MAX:
            return False
        if quote:
            if character == "\\":
                text += yield from source.next()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    arguments = _keyword_arguments(text)
    if arguments is None:
        return False
    source.forget()
    source.call(name)
    source.argue(arguments)
    source.call_ends()
    return True


def _read_name(source: Source) -> Parsing[str]:
    name = ""
    while (character := (yield from source.peek())) and source.may_begin(name + character):
        name += yield from source.next()
    return name


def _keyword_arguments(text: str) -> str | None:
    """`(x=1)` as JSON; None where it is not a call with literal keyword arguments."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        given: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            given[keyword.arg] = ast.literal_eval(keyword.value)
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
