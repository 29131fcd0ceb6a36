"""Where a request stands in a queue that is shared fairly, and how long it will probably wait."""

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


class DrainRate:
    """Requests per second that leave the queue, smoothed over about `window_s` seconds."""

    __slots__ = ("_last_count", "_last_s", "_rate", "_window_s")

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._last_count: int | None = None
        self._last_s = 0.0
        self._rate: float | None = None

    def observe(self, count: int, now_s: float) -> None:
        """`count` requests had left in all by `now_s`; a smaller one than before starts anew."""
        elapsed_s = now_s - self._last_s
        if self._last_count is None or count < self._last_count:
            self._last_count, self._last_s = count, now_s
        elif elapsed_s > 0:
            rate = (count - self._last_count) / elapsed_s
            share = min(1.0, elapsed_s / self._window_s)
            self._rate = rate if self._rate is None else self._rate + share * (rate - self._rate)
            self._last_count, self._last_s = count, now_s

    def eta_ms(self, position: int) -> int | None:
        """Milliseconds until the request at `position` is taken, or None while nothing leaves."""
        if self._rate is None or self._rate < 1e-3:
            return None
        return round(1000 * (position + 1) / self._rate)
