"""CPU time of process trees, and of everybody else on the machine."""

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class MachineTime:
    """CPU seconds of the whole machine since it started."""

    busy_s: float
    stolen_s: float
    """Given to other guests of the same host."""

    @classmethod
    def now(cls) -> "MachineTime":
        """From /proc/stat."""
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(field) * TICK_S for field in fields)
        return cls(user + nice + system + irq + softirq, steal)


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += tree(int(child))
    return found


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, with those that they have waited for."""
    return sum(_cpu_s(member) for member in tree(pid))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has ended
        return 0.0
    return sum(int(field) for field in fields[11:15]) * TICK_S


def children_cpu_s() -> float:
    """CPU seconds of the children that this process has waited for."""
    times = os.times()
    return times.children_user + times.children_system
