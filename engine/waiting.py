"""The sequences that hold nothing yet, or nothing any more, in the order of their keys."""

from bisect import insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from engine.sequence import Sequence

_KEY = attrgetter("key")


class WaitingList:
    """Sorted by `Sequence.key`, which nobody else changes while the sequence is in here."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Let it wait; of equal keys the one that came first stays first."""
        insort(self._sequences, sequence, key=_KEY)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more. Raises ValueError for one that did not."""
        self._sequences.remove(sequence)

    def first(self, count: int) -> list[Sequence]:
        """The most urgent ones."""
        return list(islice(self._sequences, count))

    def next_behind(self, first: int, count: int) -> list[Sequence]:
        """The next `count` of those behind the `first` ones; everyone gets a turn."""
        behind = len(self._sequences) - first
        if behind <= 0:
            return []
        self._next %= behind
        start = first + self._next
        self._next += count
        return self._sequences[start : start + count]

    def rekey(self, sequence: Sequence, key: float) -> None:
        """Move the sequence to where `key` belongs."""
        if key != sequence.key:
            self._sequences.remove(sequence)
            sequence.key = key
            insort(self._sequences, sequence, key=_KEY)
