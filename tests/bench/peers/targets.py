"""What the comparison with other engines is to show."""

from collections.abc import Sequence

from tests.bench.verdict import Target

PEER_TARGETS = (
    Target("ttft_p50_ratio_bf16_at_3rps", 2.5, "TTFT p50 at 3 requests/s"),
    Target("ttft_p99_ratio_bf16_at_3rps", 2.5, "TTFT p99 at 3 requests/s"),
    Target("ttft_p50_ratio_bf16_mixed_90", 4.0, "TTFT p50, mixed lengths at 90 % of its capacity"),
    Target("ttft_p99_ratio_bf16_mixed_90", 2.0, "TTFT p99, mixed lengths at 90 % of its capacity"),
    Target("max_rate_ttft_1s_ratio_bf16", 1.35, "highest rate with p99 TTFT within 1 s, at least"),
    Target("burst_throughput_ratio_bf16", 1.35, "throughput of a burst"),
    Target("tpot_p50_ratio_bf16_least", 1.5, "TPOT p50 at the rate where it gains least"),
    Target("ttft_p50_ratio_int8_at_3rps", 4.0, "int8: TTFT p50 at 3 requests/s"),
    Target("burst_throughput_ratio_int8", 2.1, "int8: throughput of a burst"),
)
"""Of ours against the peer tuned to the whole machine; int8 is ours, the peer computes in bf16."""


def peer_targets(precisions: Sequence[str]) -> list[Target]:
    """Those of these precisions."""
    return [t for t in PEER_TARGETS if ("int8" if "_int8" in t.figure else "bf16") in precisions]
