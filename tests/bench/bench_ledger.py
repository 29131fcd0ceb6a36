"""Holds a second for one hot organization, and what one hold costs when nothing else happens.

Each figure is committed to disk (fsync on): admissions through one `HoldWriter`, all of one
organization, which is the worst case. `one_by_one` is the same with a transaction for each. The
event loop is the one that production runs on. Beside each figure stands the floor: what the disk
that the database lies on took, in the same minute, to make one page durable.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from accounts.models import Organization
from billing import chart, ledger, pricing
from billing.gateways import GatewayLease
from billing.holds import AdmitHold, HoldWriter
from billing.ledger import Posting
from common.db import Sessions, create_engine, create_sessions
from common.ids import new_id
from migrations.upgrade import upgrade
from tests.bench.report import percentile, print_table, write_report
from tests.services import running_postgresql

ORGANIZATION, GATEWAY, MODEL = "org_hot", "gw_bench", "m"
CONCURRENCY = 512
WARM_UP = 50
IDLE_HOLDS = 200


@contextmanager
def databases(directory: Path) -> Iterator[dict[str, str]]:
    """SQLite in a file, PostgreSQL as it comes (its own default settings)."""
    with running_postgresql() as postgresql:
        sqlite = f"sqlite+aiosqlite:///{directory / 'bench.sqlite3'}"
        for url in (sqlite, postgresql):
            upgrade(url)
        yield {"sqlite": sqlite, "postgresql": postgresql}


async def prepare(sessions: Sessions) -> str:
    """One organization with a million dollars and a price; returns the price's id."""
    async with sessions.begin() as session:
        session.add(Organization(id=ORGANIZATION, name="hot", status="active", created_at=0))
        await session.flush()
        amount = 10**15
        await ledger.post(
            session,
            key="bench",
            kind="bench",
            organization_id=ORGANIZATION,
            postings=[
                Posting(chart.customer(ORGANIZATION), amount),
                Posting(chart.ADJUSTMENTS, -amount),
            ],
            actor="bench",
            memo="bench",
        )
        price = await pricing.set_price(session, MODEL, input=10**9, cached=10**8, output=10**9)
    await GatewayLease(sessions, GATEWAY, lease_s=3_600).renew()
    return price.id


async def admit_many(
    writer: HoldWriter, price_id: str, total: int, concurrency: int
) -> list[float]:
    """Seconds of each of `total` admissions, `concurrency` at once."""
    left = iter(range(total))
    seconds: list[float] = []

    async def admit_some() -> None:
        for _ in left:
            admit = AdmitHold(new_id("req"), ORGANIZATION, None, MODEL, price_id, GATEWAY, 100, 10)
            started = time.perf_counter()
            await writer.admit(admit)
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(admit_some() for _ in range(concurrency)))
    return seconds


async def measure(url: str, budget_s: float) -> dict[str, float]:
    """All figures of one database, each within `budget_s`."""
    engine = create_engine(url)
    sessions = create_sessions(engine)
    price_id = await prepare(sessions)
    figures: dict[str, float] = {"idle_ms": await _idle_ms(sessions, price_id)}
    for name, max_group, concurrency in (("hot", 128, CONCURRENCY), ("one_by_one", 1, 32)):
        writer = HoldWriter(sessions, max_group=max_group)
        await writer.start()
        probe = await _rate(writer, price_id, 256, concurrency)
        figures[name] = await _rate(writer, price_id, int(probe * budget_s), concurrency)
        await writer.stop()
    await engine.dispose()
    return figures


async def _idle_ms(sessions: Sessions, price_id: str) -> float:
    """What a hold takes at p50 when there is no other."""
    writer = HoldWriter(sessions)
    await writer.start()
    await admit_many(writer, price_id, WARM_UP, 1)
    alone = await admit_many(writer, price_id, IDLE_HOLDS, 1)
    await writer.stop()
    return 1_000 * percentile(alone, 0.5)


async def _rate(writer: HoldWriter, price_id: str, total: int, concurrency: int) -> float:
    started = time.perf_counter()
    await admit_many(writer, price_id, max(total, 1), concurrency)
    return max(total, 1) / (time.perf_counter() - started)


def sync_ms(directory: Path) -> float:
    """What the disk takes at p50 to make four kilobytes of a log durable: no commit is quicker."""
    seconds = []
    with (directory / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            started = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return 1_000 * percentile(seconds, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each throughput figure")
    parser.add_argument("--output", type=Path, default=Path("var/bench/ledger.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=arguments.output.parent) as directory,
        databases(Path(directory)) as urls,
    ):
        places = {"sqlite": Path(directory), "postgresql": Path(tempfile.gettempdir())}
        for name, url in urls.items():
            with tempfile.TemporaryDirectory(dir=places[name]) as beside:
                floors = [sync_ms(Path(beside))]
                measured = uvloop.run(measure(url, arguments.seconds))
                floors.append(sync_ms(Path(beside)))
            figures[f"holds_per_s_{name}_hot"] = measured["hot"]
            figures[f"holds_per_s_{name}_one_by_one"] = measured["one_by_one"]
            figures[f"hold_ms_p50_idle_{name}"] = measured["idle_ms"]
            figures[f"sync_ms_p50_{name}"] = max(floors)
            rows.append({"database": name} | measured | {"sync_ms": max(floors)})
    print_table(
        "Admissions of one organization",
        rows,
        note="hot, one_by_one: holds/s; idle_ms: one hold, p50; sync_ms: one page to disk, p50",
    )
    write_report(arguments.output, figures, rows)


if __name__ == "__main__":
    main()
