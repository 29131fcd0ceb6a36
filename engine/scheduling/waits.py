"""What a machine did while somebody waited for it: the facts behind a fairness receipt.

Every step's seconds are charged to tenants; here they are summed up over time, so that a request
that starts can be told how much of its wait went to its own tenant's requests and how much to
others'. All replicas serve one fair queue, so that one machine's sums speak for the wait as a whole.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

SPAN_US = 1_800_000_000
"""How far back the sums reach; what was before counts as nobody's."""
GRAIN_US = 100_000
"""Steps that end within so long share one point, so that half an hour stays small."""
MAX_POINTS = 2 * SPAN_US // GRAIN_US


@dataclass(frozen=True, slots=True)
class Waited:
    """How a machine spent one request's wait, in microseconds of its own time."""

    behind_own_us: int = 0
    """On other requests of the same tenant."""
    behind_others_us: int = 0
    num_tenants: int = 0
    """Tenants that were served meanwhile, the own included."""


@dataclass(slots=True)
class _Sums:
    """Seconds spent up to a time: a line through points, level outside of them."""

    times_us: list[int] = field(default_factory=list)
    sums_s: list[float] = field(default_factory=list)
    _opened_us: int = 0

    def add(self, seconds: float, started_us: int, ended_us: int) -> None:
        times, sums = self.times_us, self.sums_s
        total = sums[-1] if sums else 0.0
        if times and started_us - times[-1] < GRAIN_US and ended_us - self._opened_us < GRAIN_US:
            times[-1], sums[-1] = max(times[-1], ended_us), total + seconds
            return
        self._opened_us = started_us
        times += (max(started_us, times[-1] if times else started_us), ended_us)
        sums += (total, total + seconds)
        if len(times) > MAX_POINTS:
            del times[: MAX_POINTS // 2], sums[: MAX_POINTS // 2]

    def between(self, start_us: int, end_us: int) -> float:
        return self._at(end_us) - self._at(start_us)

    def _at(self, time_us: int) -> float:
        times, sums = self.times_us, self.sums_s
        after = bisect_right(times, time_us)
        if after == 0 or after == len(times):
            return sums[0] if after == 0 else sums[-1]
        share = (time_us - times[after - 1]) / (times[after] - times[after - 1])
        return sums[after - 1] + share * (sums[after] - sums[after - 1])


class WaitLedger:
    """The charges of one machine over time, for everything that runs on it. Not for two threads."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._by_tenant: OrderedDict[str, _Sums] = OrderedDict()
        """The one that was served last stands last."""

    def note(self, charges: Mapping[str, float], started_us: int, ended_us: int) -> None:
        """A step took from `started_us` to `ended_us`; `charges` are its seconds by tenant."""
        self._all.add(sum(charges.values()), started_us, ended_us)
        for tenant, seconds in charges.items():
            sums = self._by_tenant.get(tenant)
            if sums is None:
                sums = self._by_tenant[tenant] = _Sums()
            sums.add(seconds, started_us, ended_us)
            self._by_tenant.move_to_end(tenant)
        while self._by_tenant:
            tenant, sums = next(iter(self._by_tenant.items()))
            if sums.times_us[-1] >= ended_us - SPAN_US:
                break
            del self._by_tenant[tenant]

    def behind(self, tenant: str, start_us: int, end_us: int) -> Waited:
        """How the machine spent the wait of one of `tenant`'s requests."""
        if not self._by_tenant:
            return Waited()
        own = self._by_tenant.get(tenant)
        own_s = own.between(start_us, end_us) if own else 0.0
        others_s = self._all.between(start_us, end_us) - own_s
        return Waited(
            behind_own_us=round(own_s * 1e6),
            behind_others_us=max(0, round(others_s * 1e6)),
            num_tenants=self._served_since(start_us),
        )

    def _served_since(self, time_us: int) -> int:
        count = 0
        for sums in reversed(self._by_tenant.values()):
            if sums.times_us[-1] <= time_us:
                break
            count += 1
        return count
