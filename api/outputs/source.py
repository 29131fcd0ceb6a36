"""Text that is read while it grows, by parsers written as if all of it were there.

A parser is a generator: where it needs a character that has not come yet, it yields, and goes on
with the next piece of text. So it is one straight piece of code, and where the text is cut cannot
matter to it.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from api.outputs.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from common.ids import new_id

Value = TypeVar("Value")
Parsing = Generator[None, None, Value]
"""A parser in progress; yields where it needs more text."""
NewId = Callable[[], str]


def new_call_id() -> str:
    """An id for a call, as OpenAI writes them."""
    return new_id("call")


class Source:
    """The text that has come and is not read yet, and the deltas made of what was read."""

    def __init__(
        self, names: frozenset[str], *, new_id: NewId = new_call_id, is_parallel: bool = True
    ) -> None:
        self.is_reasoning = False
        self.num_calls = 0
        self.is_satisfied = False
        """The one call that was allowed is complete: nothing that follows is wanted."""
        self._names = names
        self._new_id = new_id
        self._is_parallel = is_parallel
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._is_ended = False
        self._deltas: list[Delta] = []

    # what the owner does

    def push(self, text: str) -> None:
        """More text has come."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """No more text will come."""
        self._is_ended = True

    def take_deltas(self) -> tuple[Delta, ...]:
        """What was made of the text since the last time."""
        deltas, self._deltas = self._deltas, []
        return tuple(deltas)

    # what parsers read

    def next(self) -> Parsing[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            if self._is_ended:
                return ""
            yield
        self._at += 1
        return self._text[self._at - 1]

    def peek(self) -> Parsing[str]:
        """The next character, which stays; empty at the end."""
        while self._at >= len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Parsing[None]:
        """Go to the next character that is not white space."""
        while (yield from self.peek()).isspace():
            self._at += 1

    def accepts(self, literal: str) -> Parsing[bool]:
        """Read `literal` if it comes next, else nothing."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self._at += len(literal)
                return True
            if self._is_ended or not literal.startswith(there):
                return False
            yield

    def until(self, markers: Sequence[str], say: Callable[[str], None]) -> Parsing[str | None]:
        """Say everything up to the first of `markers`, and answer which one it was.

        White space is held back while a marker may follow it, and dropped before one. None at the
        end of the text.
        """
        while True:
            rest = self._text[self._at :]
            found = [(at, marker) for marker in markers if (at := rest.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                say(rest[:at].rstrip())
                self._at += at + len(marker)
                return marker
            if self._is_ended:
                say(rest)
                self._at = len(self._text)
                return None
            keep = max((_overlap(rest, marker) for marker in markers), default=0)
            safe = rest[: len(rest) - keep].rstrip()
            say(safe)
            self._at += len(safe)
            yield

    # what parsers say

    def say(self, text: str) -> None:
        """More of the answer. White space between calls and after them says nothing."""
        if text and (not self.num_calls or not text.isspace()):
            self._add(TextDelta(text))

    def think(self, text: str) -> None:
        """More of the reasoning."""
        if text:
            self._add(ReasoningDelta(text))

    def knows(self, name: str) -> bool:
        """Whether there is a tool of that name."""
        return name in self._names

    def may_begin(self, text: str) -> bool:
        """Whether the name of a tool begins with `text`."""
        return any(name.startswith(text) for name in self._names)

    def call(self, name: str) -> None:
        """A call begins."""
        assert self.knows(name), name
        self._add(CallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += not self.is_satisfied

    def argue(self, arguments: str) -> None:
        """More of the arguments of the call that began last."""
        if arguments:
            self._add(CallDelta(self.num_calls - 1, arguments))

    def call_ends(self) -> None:
        """The call is complete."""
        self.is_satisfied = not self._is_parallel

    def _add(self, delta: Delta) -> None:
        if not self.is_satisfied:
            self._deltas.append(delta)

    # text that turns out not to be a call

    def remember(self) -> None:
        """From here on, what is read may have to be said after all."""
        self._mark = self._at

    def forget(self) -> None:
        """What was read since `remember` was a call."""
        self._mark = None

    def say_remembered(self) -> None:
        """What was read since `remember` was no call but text."""
        assert self._mark is not None
        self.say(self._text[self._mark : self._at])
        self._mark = None

    def rewind(self, num_characters: int) -> None:
        """Let the last characters be read again."""
        self._at -= num_characters


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
