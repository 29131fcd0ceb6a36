"""What both benchmarks do: measure what is missing, then say what is known and what is not."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.cells import BURST, Cell, CellKey, CellStore, parse_rate
from tests.bench.peers.client import Client
from tests.bench.peers.curve import Line, draw, save
from tests.bench.peers.figures import (
    Attribution,
    Comparison,
    Results,
    attribution,
    figures_of,
    highest_rates,
    losses,
    rows_of,
)
from tests.bench.peers.matrix import Matrix, TimeIsUp, alternating, expected_s
from tests.bench.peers.search import NUM_PROBES_MAX, next_rate
from tests.bench.peers.servers import Contestant
from tests.bench.peers.targets import peer_targets
from tests.bench.peers.traces import TRACES
from tests.bench.report import percentile, print_table, provenance, write_report
from tests.bench.verdict import verdict

DEFAULT_RATES = "0.5,1,2,3,3.5,burst"
PARTS = ("matrix", "capacity", "search", "policy")
CAPACITY_SHARE = 0.9
POLICY_RATES = (3.0, BURST)


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark: who is compared, and with whom."""

    name: str
    output: Path
    contestants: list[Contestant]
    comparisons: list[Comparison]
    capacity_peer: str
    """Whose burst throughput on the mixed trace is called capacity."""
    versions: Mapping[str, str]
    notes: list[str]
    attribution: Attribution | None = None
    has_targets: bool = False
    """Whether the targets of `verdict` are about this peer."""

    @property
    def compared(self) -> list[str]:
        """The names in the matrix, each once."""
        return list(dict.fromkeys(n for c in self.comparisons for n in (c.ours, c.peer)))


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    rates: list[float]
    requests: int
    burst: int
    seeds: list[int]
    traces: list[str]
    parts: list[str]
    precisions: list[str]
    minutes: float
    is_redoing_disturbed: bool
    picture: Path | None

    def counts(self, key: CellKey) -> bool:
        """Whether a stored cell is as large as this benchmark's cells."""
        return key.num_requests == (self.burst if key.rate == BURST else self.requests)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of both benchmarks."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rates", default=DEFAULT_RATES, help="requests per second, and `burst`")
    made.add_argument("--requests", type=int, default=200, help="in a cell (default 200)")
    made.add_argument("--burst", type=int, default=64, help="in a burst (default 64)")
    made.add_argument("--seeds", default="1,2,3")
    made.add_argument("--traces", default=",".join(TRACES))
    made.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    made.add_argument("--precision", default="bf16", help="bf16, int8, or both: bf16,int8")
    limit = "begin no cell that would end later; 0 measures nothing and says what is there"
    made.add_argument("--minutes", type=float, default=float("inf"), help=limit)
    made.add_argument("--redo-disturbed", action="store_true", help="measure those cells again")
    made.add_argument("--picture", type=Path, help="where to write the curve besides var/bench")
    return made


def options(arguments: argparse.Namespace) -> Options:
    """Checked; raises SystemExit with what is wrong."""
    try:
        chosen = Options(
            rates=[parse_rate(text) for text in arguments.rates.split(",")],
            requests=arguments.requests,
            burst=arguments.burst,
            seeds=[int(text) for text in arguments.seeds.split(",")],
            traces=arguments.traces.split(","),
            parts=arguments.parts.split(","),
            precisions=arguments.precision.split(","),
            minutes=arguments.minutes,
            is_redoing_disturbed=arguments.redo_disturbed,
            picture=arguments.picture,
        )
    except ValueError as fault:
        raise SystemExit(str(fault)) from fault
    for given, known in (
        (chosen.traces, TRACES),
        (chosen.parts, PARTS),
        (chosen.precisions, ("bf16", "int8")),
    ):
        if unknown := [name for name in given if name not in known]:
            raise SystemExit(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return chosen


def run(plan: Plan, chosen: Options, client: Client) -> None:
    """Measure within the time there is, then summarise."""
    known = {contestant.name for contestant in plan.contestants}
    if absent := [name for name in plan.compared if name not in known]:
        raise SystemExit(f"this engine cannot be configured as {', '.join(absent)} yet")
    store = CellStore(plan.output / "cells")
    matrix = Matrix(
        contestants={contestant.name: contestant for contestant in plan.contestants},
        client=client,
        store=store,
        versions=dict(plan.versions),
        deadline_s=time.monotonic() + chosen.minutes * 60,
        is_redoing_disturbed=chosen.is_redoing_disturbed,
    )
    absent_s = sum(
        expected_s(key) for key in _cells_of_matrix(plan, chosen) if store.find(key) is None
    )
    print(f"the matrix needs about {absent_s / 60:.0f} minutes more", flush=True)
    # `timeout` and a stopped job end it as Ctrl-C does: no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the next run goes on here"))
    with matrix:
        try:
            for part in PARTS:
                if part in chosen.parts:
                    MEASURED[part](matrix, plan, chosen)
        except TimeIsUp:
            print("the time is up: the next run goes on here", flush=True)
    summarise(plan, chosen, store)


def _cells_of_matrix(plan: Plan, chosen: Options) -> list[CellKey]:
    return alternating(
        chosen.traces,
        chosen.rates,
        chosen.seeds,
        plan.compared,
        num_requests=chosen.requests,
        num_in_burst=chosen.burst,
    )


def _measure_matrix(matrix: Matrix, plan: Plan, chosen: Options) -> None:
    matrix.run(_cells_of_matrix(plan, chosen))


def _measure_capacity(matrix: Matrix, plan: Plan, chosen: Options) -> None:
    """The peer's burst on the mixed trace, then everybody at 90 % of that rate."""
    bursts = [
        matrix.measure(CellKey("mixed", BURST, chosen.burst, seed, plan.capacity_peer))
        for seed in chosen.seeds
    ]
    rate = rate_90(plan)
    if rate is None:
        capacity = sum(cell.requests_per_s for cell in bursts) / len(bursts)
        rate = round(CAPACITY_SHARE * capacity, 2)
        record = {"capacity_requests_per_s": capacity, "rate_90": rate, "seeds": chosen.seeds}
        (plan.output / "capacity.json").write_text(json.dumps(record) + "\n")
    matrix.run(
        alternating(
            ["mixed"], [rate], chosen.seeds, plan.compared,
            num_requests=chosen.requests, num_in_burst=chosen.burst,
        )
    )  # fmt: skip


def rate_90(plan: Plan) -> float | None:
    """90 % of the peer's capacity, fixed when it was first known: later runs use the same rate."""
    path = plan.output / "capacity.json"
    return float(json.loads(path.read_text())["rate_90"]) if path.exists() else None


def _measure_search(matrix: Matrix, plan: Plan, chosen: Options) -> None:
    """Narrow down each engine's highest rate, one probe each in turn, with the first seed."""
    seeking = set(plan.compared)
    for _ in range(NUM_PROBES_MAX):
        for name in [name for name in plan.compared if name in seeking]:
            rate = next_rate(_results(matrix.store, chosen).of_contestant(name, "chat"))
            if rate is None:
                seeking.discard(name)
            else:
                matrix.measure(CellKey("chat", rate, chosen.requests, chosen.seeds[0], name))


def _measure_policy(matrix: Matrix, plan: Plan, chosen: Options) -> None:
    """Our kernels under the peer's policy, beside cells that the matrix has anyway."""
    if plan.attribution and plan.attribution.as_peer in matrix.contestants:
        names = [plan.attribution.ours, plan.attribution.peer, plan.attribution.as_peer]
        matrix.run(
            alternating(
                ["chat", "mixed"], POLICY_RATES, chosen.seeds, names,
                num_requests=chosen.requests, num_in_burst=chosen.burst,
            )
        )  # fmt: skip


MEASURED = {
    "matrix": _measure_matrix,
    "capacity": _measure_capacity,
    "search": _measure_search,
    "policy": _measure_policy,
}


def _results(store: CellStore, chosen: Options) -> Results:
    return Results.of(cell for cell in store.all() if chosen.counts(cell.key))


def summarise(plan: Plan, chosen: Options, store: CellStore) -> None:
    """Print the table and the words, write `var/bench/<name>.json` and the picture."""
    results = _results(store, chosen)
    names = [contestant.name for contestant in plan.contestants]
    rows = rows_of(results, names)
    figures, missing = figures_of(results, plan.comparisons, rate_90(plan))
    unmeasured = [key for key in _cells_of_matrix(plan, chosen) if key not in results.cells]
    notes = [*plan.notes, *_caveats(list(results.cells.values()))]
    if missing:
        notes.append("figures that cells are missing for: " + ", ".join(missing))
    if unmeasured:
        notes.append(f"{len(unmeasured)} cells of the matrix are not measured yet")
    notes += highest_rates(results, names)
    if plan.attribution:
        notes += attribution(results, plan.attribution) or [
            "how much comes from kernels and how much from scheduling is not measured"
        ]
    if plan.has_targets:
        notes += verdict(figures, peer_targets(chosen.precisions))
    notes += ["lost: " + line for line in losses(results, plan.comparisons)]
    if rows:
        print_table(
            f"{plan.name}: {provenance()['machine']}",
            rows,
            "times in milliseconds; others: cores that other processes took, at worst",
        )
        _draw(plan, results, chosen)
    for line in notes:
        print(f"- {line}")
    report = plan.output.with_suffix(".json")
    write_report(report, figures, rows, versions=plan.versions, notes=notes)
    print(json.dumps(figures))


def _caveats(cells: list[Cell]) -> list[str]:
    """What a reader must know about how these cells came about."""
    notes = []
    disturbed = sum(cell.is_disturbed for cell in cells)
    if disturbed:
        notes.append(f"{disturbed} of {len(cells)} cells were disturbed by other processes")
    for fact in ("machine", "commit"):
        values = sorted({str(cell.facts[fact]) for cell in cells})
        if len(values) > 1:
            notes.append(f"the cells come from more than one {fact}: {', '.join(values)}")
    return notes


def _draw(plan: Plan, results: Results, chosen: Options) -> None:
    lines: dict[str, Line] = {}
    num_requests = 0
    for contestant in plan.contestants:
        by_rate: dict[float, list[float]] = {}
        for cell in results.of_contestant(contestant.name, "chat"):
            if cell.key.rate != BURST:
                by_rate.setdefault(cell.key.rate, []).extend(cell.ttft_s)
        line = [
            (rate, percentile(ttfts, 0.5) * 1e3, percentile(ttfts, 0.99) * 1e3)
            for rate, ttfts in sorted(by_rate.items())
            if ttfts
        ]
        if len(line) > 1:
            lines[contestant.title] = line
            num_requests += sum(map(len, by_rate.values()))
    if lines:
        dates = sorted(str(cell.facts["date"])[:10] for cell in results.cells.values())
        svg = draw(
            "Time to first token against load: 256 tokens in, 64 out",
            f"SmolLM2-135M, a small model, on CPU cores: {provenance()['machine']}; "
            f"{num_requests:,} requests, {dates[-1]}. Lower is better.",
            lines,
        )
        for path in (plan.output.with_suffix(".svg"), chosen.picture):
            if path is not None:
                save(path, svg)
