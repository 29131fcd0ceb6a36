"""`make soak`: customers spend all that they have and pay in again while everything is killed.

    python -m tests.chaos.soak [--seconds 180] [--every 3] [--database sqlite]

Two API nodes, two workers, Celery and Redis are killed in turn. A token costs ten cents, so the credit
is used up all the time; the fake Stripe takes top-ups and its webhooks come twice, in any order, or
not at all. Customers stream, wait for the whole answer, or hang up. In the end nothing is held, each
answer was billed once for exactly the tokens that its customer saw, what broke off was free or billed
for no less than was seen, and the credit is what was paid in less what was charged. The last line is
`faults=… requests=… hung_up=… refused=… topups=… failed=… wrong=0`; what failed was answered 500.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from math import ceil
from pathlib import Path

import httpx
from sqlalchemy import func, select

from billing import payment_sweeps
from billing.models import Balance, CreditLot, HoldRecord, UsageRecord
from billing.payment_models import Topup
from billing.reconcile import reconcile
from billing.stripe_client import Payments
from common.db import Sessions, create_engine, create_sessions, read_only
from infra.local.default_model import convert_default_model
from tests.billing.fake_stripe.pump import WEBHOOK_SECRET
from tests.billing.fake_stripe.server import API_KEY, FakeStripe
from tests.billing.payments import settings_of
from tests.chaos.cluster import (
    NODES,
    WORKERS,
    Cluster,
    populate,
    running_cluster,
    save_model,
)
from tests.chaos.run import databases, do_harm, last_words, num_workers
from tests.chaos.spenders import TOPUP_CENTS, Customer, Log, Payer
from tests.conftest import CACHE

PRICE_OF_INPUT, PRICE_OF_OUTPUT = 10**12 + 7, 10**14 + 3
"""Nano-dollars per million tokens: a tenth of a cent and ten cents a token, and not whole."""
NUM_CUSTOMERS = 8
QUIET_S = 120.0
CENT = 10_000_000


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Sessions]:
    """Sessions of this process."""
    engine = create_engine(url)
    yield create_sessions(engine)
    await engine.dispose()


async def soak(
    cluster: Cluster, fake: FakeStripe, *, seconds: float, every_s: float
) -> tuple[dict[str, int], list[str]]:
    """One run; returns what was counted and what is wrong."""
    key = await populate(
        cluster.database_url,
        cluster.model_directory,
        price_of_input=PRICE_OF_INPUT,
        price_of_output=PRICE_OF_OUTPUT,
    )
    async with asyncio.timeout(QUIET_S):
        while await num_workers(cluster) < len(WORKERS):
            await asyncio.sleep(0.3)
    payments = Payments(settings_of(fake))
    log, chance = Log(), random.Random(1)
    async with (
        database(cluster.database_url) as sessions,
        httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=None)) as client,
    ):
        async with read_only(sessions) as session:
            organization_id = (await session.scalars(select(Balance.organization_id))).one()
        payer = Payer(cluster, sessions, payments, fake, organization_id, client, chance)
        customers = [
            Customer(cluster, key, client, log, random.Random(seed))
            for seed in range(NUM_CUSTOMERS)
        ]
        is_over = asyncio.Event()
        lives = [asyncio.create_task(customer.live(is_over)) for customer in customers]
        lives.append(asyncio.create_task(payer.live(is_over)))
        num_faults = await do_harm(cluster, seconds=seconds, every_s=every_s)
        is_over.set()
        await asyncio.gather(*lives)
        problems = [f"{name} ended by itself" for name in cluster.ended()]
        problems += await settled_down(sessions, payments, payer.num_paid)
        problems += await wrong_bills(sessions, log)
        problems += await wrong_credit(sessions, payer)
    await payments.close()
    counts = {
        "faults": num_faults,
        "requests": len(log.heard),
        "hung_up": log.counts["hung_up"],
        "refused": log.counts["insufficient_credit"],
        "topups": payer.num_paid,
    }
    print(f"whole={sum(one.is_whole for one in log.heard)}", dict(log.counts), flush=True)
    return counts, problems


async def settled_down(sessions: Sessions, payments: Payments, num_paid: int) -> list[str]:
    """Wait until nothing is held and every payment has come home; then the books must agree."""
    deadline = asyncio.get_running_loop().time() + QUIET_S
    while True:
        async with read_only(sessions) as session:
            is_open = select(func.count()).select_from(HoldRecord).where(HoldRecord.state == "open")
            num_open = await session.scalar(is_open) or 0
            is_paid = select(func.count()).select_from(Topup).where(Topup.state == "paid")
            num_home = await session.scalar(is_paid) or 0
        clearing = await payment_sweeps.compare_with_stripe(sessions, payments)
        is_quiet = not num_open and num_home == num_paid and clearing.is_ok
        if is_quiet or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.5)
    async with read_only(sessions) as session:
        held = await session.scalar(select(func.sum(Balance.held_nano_usd))) or 0
        checks = [*await reconcile(session), clearing]
    problems = [f"{check.name}: {check.detail}" for check in checks if not check.is_ok]
    if num_open or held:
        problems.append(f"{num_open} holds are open, {held} is held")
    if num_home != num_paid:
        problems.append(f"{num_home} of {num_paid} payments came home")
    return problems


async def wrong_bills(sessions: Sessions, log: Log) -> list[str]:
    """Every record against the published formula, and against what its customer saw."""
    async with read_only(sessions) as session:
        records = {
            record.request_id: record for record in await session.scalars(select(UsageRecord))
        }
    problems = []
    for record in records.values():
        exact = Fraction(record.uncached_input_tokens * PRICE_OF_INPUT, 10**6)
        exact += Fraction(record.cached_input_tokens * (PRICE_OF_INPUT // 10), 10**6)
        exact += Fraction(record.output_tokens * PRICE_OF_OUTPUT, 10**6)
        if record.charge_nano_usd != (ceil(exact) if record.is_billable else 0):
            problems.append(f"{record.request_id}: {record.charge_nano_usd} is not {exact}")
    if len({heard.request_id for heard in log.heard}) != len(log.heard):
        problems.append("a request id came twice")
    for heard in log.heard:
        bill = records.get(heard.request_id)
        if bill is None:
            problems.append(f"{heard.request_id}: was heard and has no record")
        elif heard.is_whole:
            assert heard.usage is not None
            told = [heard.usage[name] for name in ("prompt_tokens", "completion_tokens", "cost")]
            dollars, nano = divmod(bill.charge_nano_usd, 10**9)
            cost = f"{dollars}.{nano:09}"
            billed = [bill.input_tokens, bill.output_tokens, cost]
            if not bill.is_billable or told != billed or heard.num_tokens != bill.output_tokens:
                how = f"{bill.outcome}, {bill.finish_reason}, {bill.attempts} attempts"
                problems.append(
                    f"{heard.request_id}: saw {heard.num_tokens}, told {told}, {billed} ({how})"
                )
        elif bill.is_billable and bill.output_tokens < heard.num_tokens:
            problems.append(
                f"{heard.request_id}: saw {heard.num_tokens}, was billed {bill.output_tokens}"
            )
    return problems


async def wrong_credit(sessions: Sessions, payer: Payer) -> list[str]:
    """The credit is what came in, less what went back, less what was charged: to the nano-dollar."""
    async with read_only(sessions) as session:
        posted = (await session.scalars(select(Balance.posted_nano_usd))).one()
        charged = await session.scalar(select(func.sum(UsageRecord.charge_nano_usd))) or 0
        gift = select(CreditLot.amount_nano_usd).where(CreditLot.kind == "promotional")
        given = (await session.scalars(gift)).one()
    paid = payer.num_paid * TOPUP_CENTS - payer.refunded_cents
    expected = given + paid * CENT - int(charged)
    return [] if posted == expected else [f"the credit is {posted} and should be {expected}"]


def failures(cluster: Cluster) -> list[str]:
    """What the API nodes themselves did not expect: a customer has been answered 500."""
    logs = [(cluster.var / f"{node}.log").read_text(errors="replace") for node in NODES]
    return [line for log in logs for line in log.splitlines() if "request_failed" in line]


def soak_all(kinds: list[str], *, seconds: float, every_s: float) -> tuple[dict[str, int], int]:
    """A run on a database of each kind; returns the sums and how many things are wrong."""
    total: Counter[str] = Counter()
    num_wrong = 0
    for kind in kinds:
        fake = FakeStripe()
        fake.start()
        with tempfile.TemporaryDirectory(prefix="nc-soak-") as directory:
            var = Path(directory)
            save_model(var / "model", convert_default_model(CACHE / "models"))
            environment = {
                "STRIPE_API_KEY": API_KEY,
                "STRIPE_WEBHOOK_SECRET": WEBHOOK_SECRET,
                "STRIPE_API_BASE": fake.base_url,
                "NCOMPASS_BILLING_STRIPE_INBOX_EVERY_S": "1",
                "NCOMPASS_BILLING_PAYMENT_SWEEP_EVERY_S": "5",
            }
            with (
                databases(kind, var) as url,
                running_cluster(var, url, var / "model", environment) as cluster,
            ):
                counts, problems = asyncio.run(
                    soak(cluster, fake, seconds=seconds, every_s=every_s)
                )
                unexpected = failures(cluster)
                counts["failed"] = len(unexpected)
                print(f"{kind}: {counts}", flush=True)
                for line in unexpected + problems:
                    print(line, flush=True)
                if problems:
                    print(last_words(cluster), flush=True)
        fake.stop()
        total.update(counts)
        num_wrong += len(problems)
    return dict(total), num_wrong


def main() -> None:
    """Run, print what is wrong, and end with the line that counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of harm on each database")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults")
    parser.add_argument("--database", action="append", choices=("sqlite", "postgresql"))
    arguments = parser.parse_args()
    kinds = arguments.database or ["sqlite", "postgresql"]
    counts, num_wrong = soak_all(kinds, seconds=arguments.seconds, every_s=arguments.every)
    print(" ".join(f"{name}={count}" for name, count in counts.items()) + f" wrong={num_wrong}")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
