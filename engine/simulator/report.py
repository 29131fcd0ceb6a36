"""What a run means for users: the figures of a ledger, simulated or measured."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.simulator.ledger import RunLedger

LENGTH_LIMITS = (256, 1024, 4096, 16_384)
"""Prompt tokens that part the buckets."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in seconds; all zeros where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Spread":
        """Percentiles by nearest rank: each is a value that occurred."""
        if len(values) == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99], method="inverted_cdf").tolist()
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests whose prompts are of similar length."""

    name: str
    num_requests: int
    ttft: Spread


@dataclass(frozen=True, slots=True)
class RunReport:
    """The figures of one run."""

    num_requests: int
    num_refused: int
    ttft: Spread
    buckets: list[Bucket]
    tpot: Spread
    """By request: seconds per output token after the first."""
    gap: Spread
    """ITL: every pause between two tokens of every stream."""
    tokens_per_s: float
    requests_per_s: float
    utilisation: float
    """Share of the time in which the machines computed."""
    heaviest_tenant: str
    """The tenant with the most tokens."""
    heaviest_ttft: Spread
    others_ttft: Spread
    """Of all tenants but the heaviest."""
    num_preemptions: int
    num_steps: int
    cached_share: float
    """Part of all prompt tokens that the prefix cache held."""


def report(ledger: RunLedger, num_machines: int = 1) -> RunReport:
    """Summarize a run that has come to its end."""
    is_complete = ledger.is_complete
    requests = [
        request for request, kept in zip(ledger.requests, is_complete.tolist(), strict=True) if kept
    ]
    first_s, last_s = ledger.first_s[is_complete], ledger.last_s[is_complete]
    arrivals_s = ledger.arrivals_s[is_complete]
    assert not np.isnan(first_s).any(), "a request has no first token"
    ttft = first_s - arrivals_s
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.int64)
    streams = outputs > 1
    seconds = max(ledger.end_s - float(arrivals_s.min(initial=ledger.end_s)), 1e-9)
    heaviest, is_heaviest = _heaviest([request.tenant for request in requests], prompts + outputs)
    gaps = np.concatenate(ledger.gaps_s) if ledger.gaps_s else np.empty(0)
    return RunReport(
        num_requests=len(requests),
        num_refused=len(ledger.refused),
        ttft=Spread.of(ttft),
        buckets=_buckets(prompts, ttft),
        tpot=Spread.of(((last_s - first_s) / np.maximum(outputs - 1, 1))[streams]),
        gap=Spread.of(gaps),
        tokens_per_s=float(outputs.sum()) / seconds,
        requests_per_s=len(requests) / seconds,
        utilisation=ledger.busy_s / (seconds * num_machines),
        heaviest_tenant=heaviest,
        heaviest_ttft=Spread.of(ttft[is_heaviest]),
        others_ttft=Spread.of(ttft[~is_heaviest]),
        num_preemptions=ledger.num_preemptions,
        num_steps=ledger.num_steps,
        cached_share=float(ledger.num_cached.sum()) / max(1, int(prompts.sum())),
    )


def _heaviest(tenants: list[str], tokens: NDArray[np.int64]) -> tuple[str, NDArray[np.bool_]]:
    used: dict[str, int] = defaultdict(int)
    for tenant, count in zip(tenants, tokens.tolist(), strict=True):
        used[tenant] += count
    heaviest = max(used, key=lambda tenant: used[tenant], default="")
    return heaviest, np.array([tenant == heaviest for tenant in tenants], dtype=bool)


def _buckets(prompts: NDArray[np.int64], ttft: NDArray[np.float64]) -> list[Bucket]:
    """Those that are not empty, the shortest first."""
    edges = (0, *LENGTH_LIMITS, np.iinfo(np.int64).max)
    buckets = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (prompts > low) & (prompts <= high)
        name = f"> {low:,}" if high == edges[-1] else f"<= {high:,}"
        if inside.any():
            buckets.append(Bucket(name, int(inside.sum()), Spread.of(ttft[inside])))
    return buckets
