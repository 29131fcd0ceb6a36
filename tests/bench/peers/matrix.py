"""Measures what is asked for and not there yet, engine after engine, within a time budget."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.bench.load import burst
from tests.bench.peers.cells import BURST, Cell, CellKey, CellStore
from tests.bench.peers.client import Client
from tests.bench.peers.servers import Contestant, Server
from tests.bench.peers.traces import make_requests
from tests.bench.report import provenance

OVERHEAD_S = 20
"""Of a cell besides its requests: the load generator's start is most of it."""
BURST_RATE = 2.0
"""Requests per second that a slow engine answers of a burst."""
WARM_UP_ROUNDS = 2


class TimeIsUp(Exception):
    """The next cell does not fit into what is left of the budget."""


@dataclass(slots=True)
class Matrix:
    """Contestants, each started when it is first needed and idle while another one computes."""

    contestants: dict[str, Contestant]
    client: Client
    store: CellStore
    versions: dict[str, str]
    deadline_s: float
    """On the monotonic clock: no cell is begun that would end later."""
    is_redoing_disturbed: bool = False
    commit: str = field(default_factory=lambda: provenance()["commit"])
    """When the measurement began, also where the tree changes meanwhile."""
    _servers: dict[str, Server] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Matrix":
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def run(self, keys: Iterable[CellKey]) -> None:
        """Measure every cell of `keys` that is not there yet. Raises TimeIsUp."""
        for key in keys:
            self.measure(key)

    def measure(self, key: CellKey) -> Cell:
        """The cell of `key`: what is stored, else what is measured now. Raises TimeIsUp."""
        known = self.store.find(key)
        if known is not None and not (self.is_redoing_disturbed and known.is_disturbed):
            return known
        if time.monotonic() + expected_s(key) > self.deadline_s:
            raise TimeIsUp
        contestant = self.contestants[key.contestant]
        server = self._server(contestant)
        facts = provenance(self.versions) | {
            "commit": self.commit,
            "precision": contestant.precision,
        }
        cell = self.client.drive(key, server, facts)
        self.store.save(cell)
        print(_told(cell), flush=True)
        return cell

    def _server(self, contestant: Contestant) -> Server:
        if contestant.name not in self._servers:
            print(f"starting {contestant.title}", flush=True)
            server = self._stack.enter_context(contestant.start())
            for index in range(WARM_UP_ROUNDS):
                asyncio.run(self._warm_up(server, index))
            self._servers[contestant.name] = server
        return self._servers[contestant.name]

    async def _warm_up(self, server: Server, index: int) -> None:
        """Lengths of every kind, so that nothing is compiled or allocated for the first time."""
        bodies: list[dict[str, Any]] = [
            {
                "model": server.model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for request in make_requests("mixed", f"warm up {index}", 20, self.client.words)
        ]
        await burst(f"{server.origin}/v1", server.api_key, bodies)


def alternating(
    traces: Iterable[str],
    rates: Iterable[float],
    seeds: Iterable[int],
    contestants: list[str],
    *,
    num_requests: int,
    num_in_burst: int,
) -> list[CellKey]:
    """All cells: seed by seed, and within a trace and rate every engine in turn, another one first
    each time, so that a slow hour of the machine is nobody's."""
    keys = []
    groups = itertools.product(seeds, traces, rates)
    for index, (seed, trace, rate) in enumerate(groups):
        first = index % len(contestants)
        count = num_in_burst if rate == BURST else num_requests
        for name in contestants[first:] + contestants[:first]:
            keys.append(CellKey(trace, rate, count, seed, name))
    return keys


def expected_s(key: CellKey) -> float:
    """About how long a cell takes."""
    return OVERHEAD_S + key.num_requests / min(key.rate, BURST_RATE)


def _told(cell: Cell) -> str:
    ttfts = sorted(cell.ttft_s) or [float("nan")]
    return (
        f"{cell.key.trace:7} {cell.key.rate_name:>5}/s seed {cell.key.seed} "
        f"{cell.key.contestant:16} TTFT p50 {ttfts[len(ttfts) // 2] * 1e3:7,.0f} ms, "
        f"{cell.requests_per_s:.2f} requests/s, {cell.num_failed} failed"
        + (f"; others used {cell.other_cores:.2f} cores" if cell.is_disturbed else "")
    )
