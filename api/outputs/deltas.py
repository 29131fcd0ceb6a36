"""The pieces of meaning in a growing answer, in the order in which they came."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call: the first one of each `index` has `id` and `name`, all have arguments."""

    index: int
    arguments: str
    """A part of the arguments' JSON text."""
    id: str | None = None
    name: str | None = None


Delta = TextDelta | ReasoningDelta | CallDelta


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same in as few deltas as can be: neighbours of one kind become one."""
    found: list[Delta] = []
    for delta in deltas:
        joined = _joined(found[-1], delta) if found else None
        if joined is None:
            found.append(delta)
        else:
            found[-1] = joined
    return found


def _joined(left: Delta, right: Delta) -> Delta | None:
    if isinstance(left, TextDelta) and isinstance(right, TextDelta):
        return TextDelta(left.text + right.text)
    if isinstance(left, ReasoningDelta) and isinstance(right, ReasoningDelta):
        return ReasoningDelta(left.text + right.text)
    if isinstance(left, CallDelta) and isinstance(right, CallDelta) and right.name is None:
        return replace(left, arguments=left.arguments + right.arguments)
    return None


def chunks(deltas: tuple[Delta, ...]) -> Iterable[Delta]:
    """The deltas to stream, each in a chunk of its own; the start of a call stays by itself."""
    if len(deltas) < 2:
        return deltas
    found: list[Delta] = []
    for delta in deltas:
        is_start = found and isinstance(found[-1], CallDelta) and found[-1].name is not None
        joined = _joined(found[-1], delta) if found and not is_start else None
        if joined is None:
            found.append(delta)
        else:
            found[-1] = joined
    return found


def text_of(deltas: Iterable[Delta]) -> str:
    """The answer's text alone."""
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def reasoning_of(deltas: Iterable[Delta]) -> str:
    """The reasoning alone."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def calls_of(deltas: Iterable[Delta]) -> list[CallDelta]:
    """The complete calls."""
    return [delta for delta in merged(deltas) if isinstance(delta, CallDelta)]
