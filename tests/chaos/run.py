"""`make chaos`: kill -9 of every kind of process while real streams run, then prove that all is well.

    python -m tests.chaos.run [--seconds 60] [--every 3]

On SQLite, then on PostgreSQL. Every answer that ends is compared with the undisturbed one, its charge
with the ledger's; then the books are reconciled, the workers count their KV blocks, and nothing may
be left held, queued or running. The last line is `faults=… requests=… lost=0 double_billed=0 leaked=0`.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis
import redis.asyncio
from sqlalchemy import func, select

from billing.models import Balance, HoldRecord, UsageRecord
from billing.money import parse_usd
from billing.reconcile import reconcile
from common.db import create_engine, create_sessions, read_only
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.messages import CheckIntegrity, IntegrityReport
from infra.local.default_model import convert_default_model
from migrations.upgrade import upgrade
from tests.chaos.cluster import (
    MODEL,
    NODES,
    WORKERS,
    Cluster,
    populate,
    running_cluster,
    save_model,
)
from tests.chaos.customers import Customer, Question, Try
from tests.conftest import CACHE
from tests.services import running_postgresql

NUM_QUESTIONS = 12
NUM_CUSTOMERS = 6
SETTLE_S = 60.0


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    faults: int = 0
    requests: int = 0
    resumed: int = 0
    """Requests that took more than one attempt of a worker."""
    lost: int = 0
    double_billed: int = 0
    leaked: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Nothing went wrong."""
        return not (self.lost or self.double_billed or self.leaked or self.problems)

    def line(self) -> str:
        """The last line of `make chaos`."""
        counts = f"faults={self.faults} requests={self.requests} lost={self.lost}"
        return f"{counts} double_billed={self.double_billed} leaked={self.leaked}"

    def add(self, other: "Outcome") -> None:
        """Sum up two runs."""
        self.faults += other.faults
        self.requests += other.requests
        self.resumed += other.resumed
        self.lost += other.lost
        self.double_billed += other.double_billed
        self.leaked += other.leaked
        self.problems += other.problems


async def torment(cluster: Cluster, *, seconds: float, every_s: float) -> Outcome:
    """One whole run on a cluster that was just started."""
    key = await populate(cluster.database_url, cluster.model_directory)
    origins = {node: cluster.origin(node) for node in NODES}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60.0, limits=limits) as client:
        customer = Customer(origins, key, client)
        questions = [Question.number(index) for index in range(NUM_QUESTIONS)]
        references = await _undisturbed(cluster, customer, questions)
        outcome = Outcome()
        tries: list[Try] = []
        is_over = asyncio.Event()
        customers = [
            asyncio.create_task(
                _keep_asking(customer, questions[at:], references, outcome, tries, is_over)
            )
            for at in range(NUM_CUSTOMERS)
        ]
        outcome.faults += await do_harm(cluster, seconds=seconds, every_s=every_s)
        is_over.set()
        await asyncio.gather(*customers)
    outcome.problems += [f"{name} ended by itself" for name in cluster.ended()]
    await _check_money(cluster.database_url, references + tries, outcome)
    await _check_machines(cluster, outcome)
    return outcome


async def _undisturbed(
    cluster: Cluster, customer: Customer, questions: list[Question]
) -> list[Try]:
    """The right answers, once the platform is up on both nodes with both workers."""
    async with asyncio.timeout(120):
        while await num_workers(cluster) < len(WORKERS):
            await asyncio.sleep(0.2)
        for node in NODES:
            while not (await customer.ask(questions[0], node)).is_complete:
                await asyncio.sleep(0.2)
    asking = map(customer.ask, questions, itertools.cycle(NODES))
    return list(await asyncio.gather(*asking))


async def _keep_asking(
    customer: Customer,
    questions: list[Question],
    references: list[Try],
    outcome: Outcome,
    tries: list[Try],
    is_over: asyncio.Event,
) -> None:
    offset = len(references) - len(questions)
    for at in itertools.cycle(range(len(questions))):
        if is_over.is_set():
            return
        made = await customer.ask_until_answered(questions[at])
        outcome.requests += 1
        tries += made
        for one in made[:-1]:
            if one.error is not None and one.is_done:
                outcome.lost += 1
                outcome.problems.append(f"a stream ended with an error: {one.error}")
        if not made[-1].is_complete:
            outcome.lost += 1
            outcome.problems.append(f"never answered: {[one.error for one in made][-3:]}")
        elif not made[-1].same_answer(references[offset + at]):
            outcome.lost += 1
            outcome.problems.append(f"another answer than undisturbed: {made[-1].request_id}")


async def do_harm(cluster: Cluster, *, seconds: float, every_s: float) -> int:
    """One fault after the other, each kind in turn; what was killed starts again at once.

    Returns how many there were.
    """
    num_faults = 0
    faults: Iterator[Callable[[], None]] = itertools.cycle(
        [
            lambda: _restart(cluster, "worker"),
            cluster.wipe_redis,
            lambda: _restart(cluster, "api"),
            lambda: _restart(cluster, "worker-2"),
            lambda: _restart(cluster, "redis"),
            lambda: _restart(cluster, "api-2"),
            lambda: _restart(cluster, "celery"),
        ]
    )
    ends_at = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(every_s)
        next(faults)()
        num_faults += 1
    return num_faults


def _restart(cluster: Cluster, name: str) -> None:
    cluster.kill(name)
    cluster.start(name)


async def num_workers(cluster: Cluster) -> int:
    """Workers that are ready."""
    async with redis.asyncio.Redis.from_url(cluster.redis_url) as connection:
        broker = GatewayBroker(connection, "chaos", settings=BrokerSettings(heartbeat_cache_s=0.0))
        await broker.start()
        try:
            return sum(beat.state == "ready" for beat in await broker.heartbeats(MODEL))
        finally:
            await broker.stop()


# what must hold in the end


async def _check_money(database_url: str, tries: list[Try], outcome: Outcome) -> None:
    """Nothing held, complete answers billed as told, cut ones free, and books that balance."""
    engine = create_engine(database_url)
    sessions = create_sessions(engine)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        async with read_only(sessions) as session:
            count = select(func.count()).select_from(HoldRecord).where(HoldRecord.state == "open")
            num_open = await session.scalar(count) or 0
        if not num_open or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.5)
    async with read_only(sessions) as session:
        held = await session.scalar(select(func.sum(Balance.held_nano_usd))) or 0
        records = list(await session.scalars(select(UsageRecord)))
        checks = await reconcile(session)
    await engine.dispose()
    charged = {record.request_id: record.charge_nano_usd for record in records}
    outcome.resumed = sum(record.attempts > 1 and record.is_billable for record in records)
    outcome.leaked += num_open + (held != 0)
    outcome.problems += [f"reconcile: {check.name}" for check in checks if not check.is_ok]
    heard = [one for one in tries if one.request_id is not None]
    for one in heard:
        assert one.request_id is not None
        charge = charged.get(one.request_id)
        if one.usage is not None:
            is_right = charge == parse_usd(one.usage["cost"])
        else:
            # Cut off before its end: free, unless all of it had been said when the node died.
            is_right = not charge or bool(one.finish_reasons)
        if not is_right:
            outcome.double_billed += 1
            outcome.problems.append(f"{one.request_id} heard {one.usage}, was charged {charge}")


async def _check_machines(cluster: Cluster, outcome: Outcome) -> None:
    """Both workers are idle and own every block as often as it is referenced; no request is left."""
    async with redis.asyncio.Redis.from_url(cluster.redis_url) as connection:
        broker = GatewayBroker(connection, "chaos", settings=BrokerSettings(heartbeat_cache_s=0.0))
        await broker.start()
        reports: dict[str, IntegrityReport] = {}
        num_running = 0
        try:
            async with asyncio.timeout(SETTLE_S):
                while len(reports) < len(WORKERS) or num_running:
                    for worker in WORKERS:
                        await broker.tell(MODEL, worker, CheckIntegrity(token="chaos"))
                    await asyncio.sleep(0.7)
                    beats = await broker.heartbeats(MODEL)
                    num_running = sum(beat.num_running + beat.num_waiting for beat in beats)
                    reports = {beat.worker: beat.integrity for beat in beats if beat.integrity}
        except TimeoutError:
            outcome.leaked += num_running
            outcome.problems.append(f"workers: {sorted(reports)} answered, {num_running} run")
        finally:
            await broker.stop()
    outcome.problems += [problem for report in reports.values() for problem in report.problems]
    with redis.Redis(port=cluster.redis_port) as client:
        left = client.keys("nc:*:r:*")
    outcome.leaked += len(left)
    outcome.problems += [f"left in Redis: {key.decode()}" for key in left]


# the command


@contextmanager
def databases(kind: str, var: Path) -> Iterator[str]:
    """A migrated database of this kind."""
    if kind == "sqlite":
        url = f"sqlite+aiosqlite:///{var / 'ncompass.sqlite3'}"
        upgrade(url)
        yield url
        return
    with running_postgresql() as url:
        upgrade(url)
        yield url


def torment_all(kinds: tuple[str, ...], *, seconds: float, every_s: float) -> Outcome:
    """A run on a database of each kind."""
    outcome = Outcome()
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="nc-chaos-") as directory:
            var = Path(directory)
            save_model(var / "model", convert_default_model(CACHE / "models"))
            with (
                databases(kind, var) as url,
                running_cluster(var, url, var / "model") as cluster,
            ):
                made = asyncio.run(torment(cluster, seconds=seconds, every_s=every_s))
                print(f"{kind}: {made.resumed} resumed, {made.line()}", flush=True)
                if not made.is_good:
                    print(last_words(cluster), flush=True)
                outcome.add(made)
    return outcome


def last_words(cluster: Cluster) -> str:
    """The end of every log."""
    logs = [cluster.var / f"{name}.log" for name in cluster.names]
    tails = {log.name: log.read_text(errors="replace")[-1500:] for log in logs if log.exists()}
    return "\n".join(f"--- {name}\n{tail}" for name, tail in tails.items())


def main() -> None:
    """Run, print what was wrong, and end with the line that counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of harm on each database")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults")
    arguments = parser.parse_args()
    outcome = torment_all(
        ("sqlite", "postgresql"), seconds=arguments.seconds, every_s=arguments.every
    )
    for problem in outcome.problems:
        print(problem)
    print(outcome.line())
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
