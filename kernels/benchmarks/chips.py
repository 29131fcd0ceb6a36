"""What the vendors say their GPUs can do at most, and what a launch takes there at least.

Peaks of data sheets: dense tensor-core rates without sparsity. No machine reaches them in practice
(a copy about 92 % of the bandwidth, a large product 65 to 80 % of the rate), so a time predicted
from them is a bound and no forecast; on a GPU the benchmarks measure both rates instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.benchmarks.launches import Launch
from kernels.benchmarks.limits import Limits


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU by its data sheet."""

    name: str
    capability: int
    """10 · major + minor of its compute capability."""
    bytes_per_s: float
    operations_per_s: float
    """Dense bf16 or fp16."""
    eight_bit_operations_per_s: float
    """Dense fp8, int8 where it has no fp8."""
    memory_bytes: int

    def limits(self, *, is_eight_bit: bool = False) -> Limits:
        """Its peaks as a roofline."""
        rate = self.eight_bit_operations_per_s if is_eight_bit else self.operations_per_s
        return Limits(self.bytes_per_s, rate)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("A100", 80, 2.039e12, 3.12e14, 6.24e14, 80 * 10**9),
        Chip("H100", 90, 3.35e12, 9.89e14, 1.979e15, 80 * 10**9),
        Chip("H200", 90, 4.8e12, 9.89e14, 1.979e15, 141 * 10**9),
        Chip("B200", 100, 8.0e12, 2.25e15, 4.5e15, 180 * 10**9),
    )
}
"""SXM boards. Sources: NVIDIA's data sheets of A100 80GB, H100, H200 and HGX B200."""


def seconds_of(launches: Sequence[Launch], limits: Limits) -> float:
    """One launch after the other, each as fast as its own limit allows; nothing overlaps."""
    return sum(limits.seconds(each.num_bytes, each.num_operations) for each in launches)
