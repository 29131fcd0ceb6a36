"""How the text of one model is to be read, and the parser that reads one choice that way.

Chosen by what the model's chat template writes for its own past calls and thoughts: never by the
model's name.
"""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from api.outputs import bare_calls, marked_calls
from api.outputs.call_form import CallForm
from api.outputs.deltas import Delta
from api.outputs.source import NewId, Parsing, Source, new_call_id

CallReader = Callable[[Source], Parsing[None]]
ID_CHARACTERS = string.ascii_letters + string.digits


def new_short_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a family of models writes calls."""

    read: CallReader
    markers: tuple[str, ...] = ()
    """Control tokens that are part of it, and must not be hidden from the reader."""
    form: CallForm | None = None
    """None: calls are Python, whose arguments no schema can bind."""
    new_id: NewId = new_call_id


HERMES = Syntax(
    marked_calls.read_hermes,
    (marked_calls.TOOL_CALL, marked_calls.END_TOOL_CALL),
    CallForm(
        trigger=marked_calls.TOOL_CALL,
        begin='\n{"name": "{name}", "arguments": ',
        end="}\n",
        after=marked_calls.END_TOOL_CALL,
    ),
)
MISTRAL = Syntax(
    marked_calls.read_mistral,
    (marked_calls.TOOL_CALLS, marked_calls.ARGS, marked_calls.CALL_ID),
    CallForm(
        trigger=marked_calls.TOOL_CALLS,
        before="[",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        separator=", ",
        after="]",
    ),
    new_short_id,
)
MISTRAL_NAMED = replace(
    MISTRAL, form=CallForm(trigger=marked_calls.TOOL_CALLS, begin="{name}" + marked_calls.ARGS)
)
"""Since the eleventh version of Mistral's tokenizer."""
DEEPSEEK = Syntax(
    marked_calls.read_deepseek,
    (
        marked_calls.CALLS_BEGIN,
        marked_calls.CALLS_END,
        marked_calls.CALL_BEGIN,
        marked_calls.CALL_END,
        marked_calls.SEPARATOR,
    ),
    CallForm(
        trigger=marked_calls.CALL_BEGIN,
        begin="{name}" + marked_calls.SEPARATOR,
        after=marked_calls.CALL_END,
    ),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    form=CallForm(
        trigger=marked_calls.CALL_BEGIN,
        begin=f"function{marked_calls.SEPARATOR}{{name}}\n```json\n",
        end="\n```",
        after=marked_calls.CALL_END,
    ),
)
"""V3 and R1."""
LLAMA = Syntax(
    bare_calls.read_llama,
    (bare_calls.PYTHON_TAG,),
    CallForm(trigger='{"name": "', begin='{name}", "parameters": ', end="}"),
)
PYTHONIC = Syntax(bare_calls.read_pythonic, (bare_calls.PYTHON_START, bare_calls.PYTHON_END))


def syntax_of(template: str) -> Syntax:
    """The syntax that a chat template teaches; Hermes' where it teaches none."""
    if marked_calls.TOOL_CALLS in template:
        return MISTRAL_NAMED if marked_calls.ARGS in template else MISTRAL
    if marked_calls.CALLS_BEGIN in template:
        return DEEPSEEK_FENCED if "```json" in template else DEEPSEEK
    if marked_calls.TOOL_CALL in template:
        return HERMES
    if bare_calls.PYTHON_START in template or "func_name1(" in template:
        return PYTHONIC
    if bare_calls.PYTHON_TAG in template or '"parameters":' in template:
        return LLAMA
    return HERMES


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning."""

    begin: str
    end: str


THINKING_MARKERS = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


def thinking_of(template: str) -> Thinking | None:
    """The markers that a chat template knows; None for a model that does not reason."""
    return next((found for found in THINKING_MARKERS if found.end in template), None)


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be found in the text of one request. The default: nothing but text."""

    thinking: Thinking | None = None
    begins_in_thought: bool = False
    """The prompt ends with the marker that opens the reasoning."""
    names: frozenset[str] = frozenset()
    """The functions that may be called."""
    syntax: Syntax | None = None
    """None: calls are not looked for."""
    is_forced: bool = False
    """A grammar makes the model write a JSON list of calls, whatever its own syntax."""
    is_parallel: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer as it stands."""
        return self.thinking is None and self.syntax is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser even where they are control tokens."""
        thinking = (self.thinking.begin, self.thinking.end) if self.thinking else ()
        return thinking + (self.syntax.markers if self.syntax else ())

    def parser(self) -> "Parser":
        """A parser for one choice."""
        return Parser(self)


PLAIN = Reading()


class Parser:
    """Turns the text of one choice into deltas. Where the text is cut does not matter."""

    def __init__(self, reading: Reading) -> None:
        new_id = reading.syntax.new_id if reading.syntax else new_call_id
        self._source = Source(reading.names, new_id=new_id, is_parallel=reading.is_parallel)
        self._parsing = _read(self._source, reading)
        next(self._parsing, None)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is inside of the reasoning now."""
        return self._source.is_reasoning

    @property
    def is_satisfied(self) -> bool:
        """Whether the one call that was allowed is complete."""
        return self._source.is_satisfied

    @property
    def has_calls(self) -> bool:
        """Whether something was called."""
        return self._source.num_calls > 0

    def push(self, text: str) -> tuple[Delta, ...]:
        """What `text` adds."""
        self._source.push(text)
        next(self._parsing, None)
        return self._source.take_deltas()

    def end(self) -> tuple[Delta, ...]:
        """What was held back, now that no more text comes."""
        self._source.end()
        next(self._parsing, None)
        return self._source.take_deltas()


def _read(source: Source, reading: Reading) -> Parsing[None]:
    if reading.thinking is not None:
        yield from _read_thoughts(source, reading.thinking, reading.begins_in_thought)
    if reading.is_forced:
        source.remember()
        if not (yield from marked_calls.read_call_list(source)):
            source.say_remembered()
    elif reading.syntax is not None:
        yield from reading.syntax.read(source)
    if not source.is_satisfied:
        yield from bare_calls.say_rest(source)


def _read_thoughts(source: Source, thinking: Thinking, is_open: bool) -> Parsing[None]:
    """The reasoning, if the text begins with any, and the empty lines around it."""
    source.is_reasoning = is_open
    source.remember()
    yield from source.skip_space()
    if (yield from source.accepts(thinking.begin)):
        source.is_reasoning = True
    elif not is_open:
        source.say_remembered()
        return
    source.forget()
    yield from source.skip_space()
    yield from source.until([thinking.end], source.think)
    source.is_reasoning = False
    yield from source.skip_space()
