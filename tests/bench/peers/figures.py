"""From cells to what is said: rows, ratios under the names of DESIGN §8, and words.

A ratio above 1 says that we are better. Requests of several seeds are pooled, of seeds only that
both sides have; a figure whose cells are missing is left out, and named as missing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.peers.cells import BURST, Cell, CellKey
from tests.bench.peers.search import TTFT_LIMIT_S, bracket
from tests.bench.report import percentile

RATES_COMPARED = (1, 2, 3)
OURS = {"bf16": "ours", "int8": "ours_int8"}
"""By precision: which of our engines is compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of ours against one peer; `prefix` comes before the figures' names."""

    prefix: str
    precision: str
    ours: str
    peer: str


@dataclass(frozen=True, slots=True)
class Attribution:
    """Three engines that tell kernels from scheduling: ours, ours planning as the peer, the peer."""

    ours: str
    as_peer: str
    peer: str


@dataclass(frozen=True, slots=True)
class Pool:
    """Runs of one engine at one rate of one trace, taken together."""

    ttft_s: list[float]
    tpot_s: list[float]
    requests_per_s: float
    tokens_per_s: float
    num_failed: int

    @classmethod
    def of(cls, cells: list[Cell]) -> "Pool":
        """All requests of `cells`."""
        seconds = sum(cell.duration_s for cell in cells)
        return cls(
            ttft_s=[ttft for cell in cells for ttft in cell.ttft_s],
            tpot_s=[tpot for cell in cells for tpot in cell.tpot_s],
            requests_per_s=sum(len(cell.ttft_s) for cell in cells) / seconds,
            tokens_per_s=sum(cell.output_tokens for cell in cells) / seconds,
            num_failed=sum(cell.num_failed for cell in cells),
        )


Measure = Callable[[Pool], float]
LATENCIES: Mapping[str, Measure] = {
    "ttft_p50": lambda pool: percentile(pool.ttft_s, 0.5),
    "ttft_p99": lambda pool: percentile(pool.ttft_s, 0.99),
    "tpot_p50": lambda pool: percentile(pool.tpot_s, 0.5),
}


@dataclass(frozen=True, slots=True)
class Results:
    """All cells of one benchmark with the same number of requests."""

    cells: Mapping[CellKey, Cell]

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> "Results":
        """By key."""
        return cls({cell.key: cell for cell in cells})

    def of_contestant(self, name: str, trace: str) -> list[Cell]:
        """Every run of one engine on one trace."""
        return [c for k, c in self.cells.items() if k.contestant == name and k.trace == trace]

    def pair(self, trace: str, rate: float, ours: str, peer: str) -> tuple[Pool, Pool] | None:
        """Both engines' requests, of the seeds that both have; None when there are none."""
        found: list[dict[tuple[int, int], Cell]] = []
        for name in (ours, peer):
            runs = [c for c in self.of_contestant(name, trace) if c.key.rate == rate and c.ttft_s]
            found.append({(c.key.seed, c.key.num_requests): c for c in runs})
        common = sorted(found[0].keys() & found[1].keys())
        if not common:
            return None
        left, right = (Pool.of([runs[key] for key in common]) for runs in found)
        return left, right


def figures_of(
    results: Results, comparisons: Iterable[Comparison], rate_90: float | None
) -> tuple[dict[str, float], list[str]]:
    """(figures by name, names of the figures whose cells are missing)."""
    figures: dict[str, float] = {}
    missing: list[str] = []
    for comparison in comparisons:
        wanted = _wanted(results, comparison, rate_90)
        figures |= {name: value for name, value in wanted.items() if value is not None}
        missing += [name for name, value in wanted.items() if value is None]
    return figures, missing


def _wanted(
    results: Results, comparison: Comparison, rate_90: float | None
) -> dict[str, float | None]:
    """Every figure of one comparison; None where cells are missing."""
    prefix, precision = comparison.prefix, comparison.precision
    wanted: dict[str, float | None] = {}
    for rate in RATES_COMPARED:
        pair = results.pair("chat", rate, comparison.ours, comparison.peer)
        for name, measure in LATENCIES.items():
            wanted[f"{prefix}{name}_ratio_{precision}_at_{rate}rps"] = _faster(pair, measure)
    wanted[f"{prefix}tpot_p50_ratio_{precision}_least"] = _least_tpot(results, comparison)
    pair = results.pair("mixed", rate_90, comparison.ours, comparison.peer) if rate_90 else None
    for name in ("ttft_p50", "ttft_p99"):
        wanted[f"{prefix}{name}_ratio_{precision}_mixed_90"] = _faster(pair, LATENCIES[name])
    wanted[f"{prefix}max_rate_ttft_1s_ratio_{precision}"] = _least_rate_gain(results, comparison)
    pair = results.pair("chat", BURST, comparison.ours, comparison.peer)
    wanted[f"{prefix}burst_throughput_ratio_{precision}"] = (
        pair[0].requests_per_s / pair[1].requests_per_s if pair else None
    )
    return wanted


def _least_rate_gain(results: Results, comparison: Comparison) -> float | None:
    """How much higher our highest rate is at least: one that we hold, by one that the peer does not."""
    holding, _ = bracket(results.of_contestant(comparison.ours, "chat"))
    _, failing = bracket(results.of_contestant(comparison.peer, "chat"))
    return holding / failing if holding and failing else None


def _least_tpot(results: Results, comparison: Comparison) -> float | None:
    """The smallest gain at any rate of the chat trace, the burst included."""
    rates = {k.rate for k in results.cells if k.trace == "chat" and k.contestant == comparison.ours}
    pairs = [results.pair("chat", rate, comparison.ours, comparison.peer) for rate in rates]
    ratios = [_faster(pair, LATENCIES["tpot_p50"]) for pair in pairs]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _faster(pair: tuple[Pool, Pool] | None, measure: Measure) -> float | None:
    return measure(pair[1]) / measure(pair[0]) if pair else None


def rows_of(results: Results, contestants: list[str]) -> list[dict[str, Any]]:
    """One row for each engine at each rate of each trace, engines side by side."""
    groups: dict[tuple[str, float, int], list[Cell]] = {}
    for key, cell in results.cells.items():
        if key.contestant in contestants and cell.ttft_s:
            rank = contestants.index(key.contestant)
            groups.setdefault((key.trace, key.rate, rank), []).append(cell)
    return [_row(cells) for _, cells in sorted(groups.items(), key=lambda item: item[0])]


def _row(cells: list[Cell]) -> dict[str, Any]:
    pool, key = Pool.of(cells), cells[0].key
    return {
        "trace": key.trace,
        "rate": key.rate_name,
        "engine": key.contestant,
        "requests": len(pool.ttft_s),
        "failed": pool.num_failed,
        "TTFT p50": round(percentile(pool.ttft_s, 0.5) * 1e3),
        "TTFT p99": round(percentile(pool.ttft_s, 0.99) * 1e3),
        "TPOT p50": round(percentile(pool.tpot_s, 0.5) * 1e3, 1),
        "req/s": pool.requests_per_s,
        "tokens/s": round(pool.tokens_per_s),
        "others": max(cell.other_cores for cell in cells),
    }


def losses(results: Results, comparisons: Iterable[Comparison]) -> list[str]:
    """Every latency or burst, on any trace, at which a peer is better: one line each."""
    lines = []
    for comparison in comparisons:
        points = {(k.trace, k.rate) for k in results.cells if k.contestant == comparison.ours}
        for trace, rate in sorted(points):
            pair = results.pair(trace, rate, comparison.ours, comparison.peer)
            ratios = {name: _faster(pair, measure) for name, measure in LATENCIES.items()}
            if pair and rate == BURST:
                ratios["throughput"] = pair[0].requests_per_s / pair[1].requests_per_s
            shown = "burst" if rate == BURST else f"{rate:g}/s"
            lines += [
                f"{trace} {shown}: {comparison.peer} is {1 / ratio:.2f}x better than "
                f"{comparison.ours} in {name}"
                for name, ratio in ratios.items()
                if ratio is not None and ratio < 1
            ]
    return lines


def highest_rates(results: Results, contestants: list[str]) -> list[str]:
    """For each engine the highest rate that keeps the promise, in words."""
    lines = []
    for name in contestants:
        holding, failing = bracket(results.of_contestant(name, "chat"))
        if holding is None and failing is None:
            continue
        low = f"holds at {holding:g}/s" if holding else "holds at no rate that was tried"
        high = f"no longer at {failing:g}/s" if failing else "no rate was found at which it fails"
        lines.append(f"{name}: p99 TTFT <= {TTFT_LIMIT_S:g} s {low}, {high}")
    return lines


def attribution(results: Results, engines: Attribution) -> list[str]:
    """How much comes from kernels and how much from scheduling: a line for each trace and rate."""
    lines = []
    points = {(k.trace, k.rate) for k in results.cells if k.contestant == engines.as_peer}
    for trace, rate in sorted(points):
        kernels = results.pair(trace, rate, engines.as_peer, engines.peer)
        scheduling = results.pair(trace, rate, engines.ours, engines.as_peer)
        if not kernels or not scheduling:
            continue
        shown = "burst" if rate == BURST else f"{rate:g}/s"
        parts = [
            f"{name} {_faster(kernels, measure):.2f}x by kernels, "
            f"{_faster(scheduling, measure):.2f}x by scheduling"
            for name, measure in LATENCIES.items()
        ]
        lines.append(f"{trace} {shown}: " + "; ".join(parts))
    return lines
