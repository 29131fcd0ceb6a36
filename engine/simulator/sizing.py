"""How many machines a load needs, so that its times to first token stay below a target."""

from dataclasses import dataclass

from engine.simulator.machines import Machine
from engine.simulator.policies import Policy
from engine.simulator.report import RunReport, report
from engine.simulator.simulation import simulate
from engine.simulator.trace import TracedRequest

MACHINES_MAX = 256


@dataclass(frozen=True, slots=True)
class Target:
    """What users are promised: TTFT at p99 and, where it is given, TPOT at p50."""

    ttft_p99_s: float
    tpot_p50_s: float = float("inf")

    def is_met(self, found: RunReport) -> bool:
        """Whether this run keeps the promise; refused requests break it."""
        is_fast = found.ttft.p99 <= self.ttft_p99_s and found.tpot.p50 <= self.tpot_p50_s
        return is_fast and found.num_refused == 0


@dataclass(frozen=True, slots=True)
class Sizing:
    """The smallest number that meets the target, and how it does; None where not even the most do."""

    num_machines: int | None
    report: RunReport
    """With that number, or with the most that was tried."""


def machines_needed(
    requests: list[TracedRequest],
    machine: Machine,
    policy: Policy,
    target: Target,
    most: int = MACHINES_MAX,
) -> Sizing:
    """Double until it is enough, then search between.

    More machines are taken to be never worse, which holds but for noise near the target.
    """
    found: dict[int, RunReport] = {}

    def is_enough(count: int) -> bool:
        found[count] = report(simulate(requests, machine, policy, count), count)
        return target.is_met(found[count])

    high = 1
    while not is_enough(high):
        if high >= most:
            return Sizing(None, found[high])
        high = min(2 * high, most)
    low = max((count for count in found if count < high), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return Sizing(high, found[high])
