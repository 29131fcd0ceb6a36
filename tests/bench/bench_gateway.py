"""What the gateway costs: latency it adds, requests and streams that one core of it carries.

The API process has a core for itself; PostgreSQL, Redis, the null engine and the load generator
share the others. LiteLLM's proxy and Portkey's gateway stand in front of a null engine that speaks
OpenAI's API, one after the other, pinned alike. `--only` measures some cells anew and keeps the rest
of the last report.
"""

import argparse
import json
import platform
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from infra.local.default_model import convert_default_model
from tests.bench.gateway import cells, figures, servers
from tests.bench.gateway.cells import Cell, Served
from tests.bench.gateway.figures import DIRECT, LITELLM, OURS, PORTKEY, STREAMS
from tests.bench.gateway.words import Words
from tests.bench.report import print_table, provenance, write_report

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Measure = Callable[[Served], Coroutine[Any, Any, Cell]]
CELLS = ("open", "closed", "streams", "stall")
LITELLM_RATE = 50.0
"""It answers some hundred requests a second, and would not answer 200 at all."""
PEER_STREAMS = 300
"""LiteLLM's proxy delivers some 1,100 to 1,250 tokens a second: 400 of these streams."""


def plan(arguments: argparse.Namespace, words: Words) -> dict[str, dict[str, Measure]]:
    """What is measured of whom."""

    def opened(served: Served) -> Coroutine[Any, Any, Cell]:
        return cells.open_loop(served, words, rate=arguments.rate, seconds=arguments.seconds)

    def opened_slowly(served: Served) -> Coroutine[Any, Any, Cell]:
        rate = min(arguments.rate, LITELLM_RATE)
        return cells.open_loop(served, words, rate=rate, seconds=arguments.seconds)

    def closed(served: Served) -> Coroutine[Any, Any, Cell]:
        return cells.closed_loop(
            served, words, concurrency=arguments.concurrency, seconds=arguments.seconds
        )

    def streams(count: int, rate: float) -> Measure:
        return lambda served: cells.open_streams(
            served, words, num_streams=count, opened_per_s=rate, steady_s=arguments.steady
        )

    def stall(served: Served) -> Coroutine[Any, Any, Cell]:
        return cells.stall(served, words, num_streams=300)

    both: dict[str, Measure] = {"open": opened, "closed": closed}
    ours = both | {"streams": streams(arguments.streams, arguments.opened), "stall": stall}
    peers = both | {"streams": streams(PEER_STREAMS, 30)}
    slow = peers | {"open": opened_slowly}
    return {DIRECT: both, OURS: ours, LITELLM: slow, PORTKEY: peers}


def measure(
    arguments: argparse.Namespace, directory: Path, wanted: dict[str, dict[str, Measure]]
) -> list[Row]:
    """Start one gateway after the other and run its cells."""
    core, logs, peers = servers.split_cores(), servers.make_logs(), ROOT / "var" / "peers"
    print(f"the gateway has core {core}; what the processes say: {logs}", flush=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        upstream = stack.enter_context(servers.null_server(directory, logs))
        contexts = {
            OURS: lambda: servers.ours(core, directory, logs),
            LITELLM: lambda: servers.litellm(core, upstream, peers, logs),
            PORTKEY: lambda: servers.portkey(core, upstream, peers, logs),
        }
        for name, of_gateway in wanted.items():
            if name == DIRECT:
                rows += _run(upstream, of_gateway)
            elif of_gateway:
                try:
                    with contexts[name]() as served:
                        rows += _run(served, of_gateway)
                except servers.NoAnswer as silence:
                    if name == OURS:
                        raise
                    print(f"NOT MEASURED: {name} answers nothing. {silence}", flush=True)
    return rows


def _run(served: Served, of_gateway: dict[str, Measure]) -> list[Row]:
    print(f"{served.name} runs as {served.pid}", flush=True)
    rows = []
    for cell, work in of_gateway.items():
        measured = uvloop.run(work(served))
        row = {"cell": cell} | cells.as_row(served.name, measured)
        print(json.dumps(row), flush=True)
        if figures.is_silent(row):
            print(f"{served.name} answered NOTHING in the cell '{cell}'", flush=True)
        rows.append(row | {"date": provenance()["date"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a cell at a rate")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--concurrency", type=int, default=32, help="of the closed loop")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--steady", type=float, default=10.0, help="seconds with all streams open")
    parser.add_argument("--opened", type=float, default=100.0, help="streams opened a second")
    parser.add_argument("--only", default="", help="e.g. nCompass/open,LiteLLM")
    parser.add_argument("--output", type=Path, default=Path("var/bench/gateway.json"))
    arguments = parser.parse_args()
    directory = convert_default_model(ROOT / "var" / "models")
    wanted = chosen(plan(arguments, Words(directory)), arguments.only)
    rows = measure(arguments, directory, wanted)
    done = {(row["gateway"], row["cell"]) for row in rows}
    known = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    if arguments.only:
        rows += [row for row in known if (row["gateway"], row["cell"]) not in done]
    found = figures.figures(rows)
    for cell in CELLS:
        if of_cell := [row for row in rows if row["cell"] == cell]:
            hidden = ("cell", "date")
            print_table(
                cell, [{k: v for k, v in row.items() if k not in hidden} for row in of_cell]
            )
    print_table(
        "Ours beside the peers", figures.beside_peers(found, rows), note="ratio > 1: ours is better"
    )
    if kept := figures.promises(found):
        print_table("What was promised", kept)
    versions = {"litellm": servers.LITELLM, "portkey": servers.PORTKEY}
    write_report(arguments.output, found, rows, versions=versions | {"os": platform.release()})


def chosen(planned: dict[str, dict[str, Measure]], only: str) -> dict[str, dict[str, Measure]]:
    """Those cells of `planned` that `only` names: `gateway` or `gateway/cell`, separated by commas."""
    if not only:
        return planned
    names = only.split(",")
    return {
        gateway: {
            cell: work
            for cell, work in of_gateway.items()
            if gateway in names or f"{gateway}/{cell}" in names
        }
        for gateway, of_gateway in planned.items()
    }


if __name__ == "__main__":
    main()
