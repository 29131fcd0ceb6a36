"""The sequences that hold nothing yet, or nothing any more, in the order of their places."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import attrgetter

from engine.sequence import Sequence

_PLACE = attrgetter("place")


class WaitingList:
    """Sorted by `Sequence.place`, which nobody else changes while the sequence is in here."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._next = 0
        self._is_ranked = False
        self._weights: dict[str, float] = {}
        self._num_of: Counter[str] = Counter()
        """Sequences by tenant."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Let it wait; of equal places the one that came first stays first."""
        insort(self._sequences, sequence, key=_PLACE)
        request = sequence.request
        self._num_of[request.tenant] += 1
        self._weights[request.tenant] = request.weight

    def remove(self, sequence: Sequence) -> None:
        """It waits no more. Raises ValueError for one that did not."""
        self._sequences.remove(sequence)
        tenant = sequence.request.tenant
        self._num_of[tenant] -= 1
        if self._num_of[tenant] == 0:
            del self._num_of[tenant], self._weights[tenant]

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
            insort(self._sequences, sequence, key=_PLACE)

    @property
    def weights(self) -> Mapping[str, float]:
        """The tenants that wait, with their weights."""
        return self._weights

    def rank(self, surplus_s: Mapping[str, float]) -> None:
        """Put every tenant's requests behind by the seconds that it is ahead of others."""
        if not surplus_s and not self._is_ranked:
            return
        self._is_ranked = bool(surplus_s)
        for sequence in self._sequences:
            sequence.surplus_s = surplus_s.get(sequence.request.tenant, 0.0)
        self._sequences.sort(key=_PLACE)
