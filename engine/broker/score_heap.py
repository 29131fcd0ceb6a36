"""Members ordered by a score that changes often: what the twin needs of a Redis sorted set."""

import heapq
from collections.abc import Collection

SPARE_ENTRIES = 64
"""Outdated entries of the heap that are never worth a clean-up."""


class ScoreHeap:
    """Unique members by score, equal scores by name. O(log n) for every change."""

    __slots__ = ("_heap", "_scores")

    def __init__(self) -> None:
        self._scores: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Every member's entry, and outdated ones, which are skipped when they come up."""

    def __len__(self) -> int:
        return len(self._scores)

    def score(self, member: str) -> float | None:
        """The member's score, or None where it is not one."""
        return self._scores.get(member)

    def add(self, member: str, score: float) -> None:
        """Add a member, or change its score."""
        if self._scores.get(member) == score:
            return
        self._scores[member] = score
        heapq.heappush(self._heap, (score, member))
        if len(self._heap) > 4 * len(self._scores) + SPARE_ENTRIES:
            self._heap = [(value, name) for name, value in self._scores.items()]
            heapq.heapify(self._heap)

    def remove(self, member: str) -> None:
        """Remove a member; nothing happens where it is none."""
        self._scores.pop(member, None)

    def first(self) -> tuple[float, str]:
        """The least score and its member."""
        while self._scores.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def first_except(self, members: Collection[str]) -> str | None:
        """The member with the least score that is none of `members`."""
        if not self._scores or not members:
            return self.first()[1] if self._scores else None
        others = ((score, name) for name, score in self._scores.items() if name not in members)
        return min(others, default=(0.0, None))[1]

    def pop_first(self) -> tuple[float, str]:
        """Remove the member with the least score."""
        score, member = self.first()
        heapq.heappop(self._heap)
        del self._scores[member]
        return score, member

    def up_to(self, score: float) -> list[str]:
        """Members with at most that score, least first."""
        return [name for _, name in sorted((v, m) for m, v in self._scores.items() if v <= score)]

    def below(self, score: float) -> list[str]:
        """Members with less than that score."""
        return [member for member, value in self._scores.items() if value < score]

    def items(self) -> dict[str, float]:
        """Every member's score."""
        return dict(self._scores)
