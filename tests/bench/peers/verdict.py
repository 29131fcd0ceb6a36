"""The verdict: each target of the comparison, reached or missed, in words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """How many times better than the peer a figure is to be."""

    figure: str
    least: float
    words: str


TARGETS = (
    Target("ttft_p50_ratio_bf16_at_3rps", 2.5, "TTFT p50 at 3 requests/s"),
    Target("ttft_p99_ratio_bf16_at_3rps", 2.5, "TTFT p99 at 3 requests/s"),
    Target("ttft_p50_ratio_bf16_mixed_90", 4.0, "TTFT p50, mixed lengths at 90 % of its capacity"),
    Target("ttft_p99_ratio_bf16_mixed_90", 2.0, "TTFT p99, mixed lengths at 90 % of its capacity"),
    Target("max_rate_ttft_1s_ratio_bf16", 1.35, "highest rate with p99 TTFT within 1 s"),
    Target("burst_throughput_ratio_bf16", 1.35, "throughput of a burst"),
    Target("tpot_p50_ratio_bf16_least", 1.5, "TPOT p50 at the rate where it gains least"),
    Target("ttft_p50_ratio_int8_at_3rps", 4.0, "int8: TTFT p50 at 3 requests/s"),
    Target("burst_throughput_ratio_int8", 2.1, "int8: throughput of a burst"),
)
"""Of ours against the peer tuned to the whole machine; int8 is ours, the peer computes in bf16."""


def verdict(
    figures: Mapping[str, float], precisions: Iterable[str], targets: Iterable[Target] = TARGETS
) -> list[str]:
    """One line for each target of these precisions, the reached ones first."""
    wanted = set(precisions)
    ours = [target for target in targets if _precision(target) in wanted]
    reached, missed, unknown = [], [], []
    for target in ours:
        ratio = figures.get(target.figure)
        if ratio is None:
            unknown.append(f"not measured: {target.words} (target {target.least:g} x)")
        elif ratio >= target.least:
            reached.append(f"reached: {target.words} {ratio:.2f} x (target {target.least:g} x)")
        else:
            missed.append(f"missed: {target.words} {ratio:.2f} x (target {target.least:g} x)")
    total = f"{len(reached)} of {len(ours)} targets reached, {len(missed)} missed"
    return [total, *reached, *missed, *unknown]


def _precision(target: Target) -> str:
    return "int8" if "_int8" in target.figure else "bf16"
