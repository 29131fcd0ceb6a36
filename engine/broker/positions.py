"""Where a request stands in a queue that is shared fairly."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A request's place: 0 is next. `eta_ms` is None while nothing is known of the pace."""

    position: int
    num_waiting: int
    eta_ms: int | None
    num_own_ahead: int = 0
    """Requests of the same tenant that go first."""
    num_tenants: int = 0
    """Tenants that wait, the own included."""
    is_model_loading: bool = False
    """No worker has the model in memory: one is loading it, or is about to."""

    @property
    def num_others_ahead(self) -> int:
        """Requests of other tenants that go first."""
        return self.position - self.num_own_ahead


class QueueShape:
    """Lengths of the tenants' queues, asked for the position that a place in one of them means.

    Tenants with equal work take turns, so before the request at place `p` of its own queue, each
    other tenant has had about min(its length, p + 1) turns.
    """

    __slots__ = ("_lengths", "_sums", "num_tenants", "num_waiting")

    def __init__(self, lengths: Sequence[int], num_tenants: int) -> None:
        """`lengths` may cover a sample of `num_tenants` tenants; the rest is taken to be alike."""
        self._lengths = sorted(lengths)
        self._sums = list(accumulate(self._lengths, initial=0))
        self.num_tenants = num_tenants
        scale = num_tenants / len(lengths) if lengths else 0.0
        self.num_waiting = round(self._sums[-1] * scale)

    def position(self, place: int) -> int:
        """Requests that go before the one at `place` (0 is first) of its tenant's queue."""
        turns = place + 1
        short = bisect_right(self._lengths, turns)
        total = self._sums[short] + turns * (len(self._lengths) - short)
        scale = self.num_tenants / len(self._lengths) if self._lengths else 0.0
        return max(place, round(total * scale) - 1)
