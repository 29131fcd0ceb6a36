"""celery 5935, 6229, 3501; kombu 1733: tasks that ran twice, or were lost with their worker."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select

from billing import ledger
from billing.holds import HoldWriter
from billing.models import HoldRecord, LedgerTransaction, UsageHour, UsageRecord
from billing.payment_models import StripeEvent, Topup
from billing.payment_profiles import set_recharge
from common import outbox
from common.db import read_only
from common.outbox import OutboxMessage
from tests.billing.conftest import Books, settle_of
from tests.billing.fake_stripe.server import API_KEY
from tests.billing.fake_stripe.state import GOOD
from tests.billing.payments import CENT, DOLLAR, Desk, database_url, desk, fake, running_stripe

__all__ = ["database_url", "desk", "fake", "running_stripe"]

NUM_TOPUPS = 8
NUM_MESSAGES = 12
NUM_HOLDS = 20
KILLS = 5


@contextmanager
def celery(environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "celery", "-A", "billing.celery_app", "worker", "-B"]
    process = subprocess.Popen(
        [*command, "--concurrency", "2", "--without-gossip", "--without-mingle"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def kill_a_child(process: "subprocess.Popen[bytes]", chance: random.Random) -> None:
    """One process of the pool, in the middle of whatever it does."""
    children = psutil.Process(process.pid).children(recursive=True)
    if children:
        chance.choice(children).kill()


async def work_to_do(desk: Desk) -> int:
    """Payments whose webhooks are stored, mails to send, lost holds, and a card to be charged."""
    desk.now_us = time.time_ns() // 1_000
    await desk.paid(is_card_saved=True)
    for number in range(NUM_TOPUPS):
        topup = await desk.open_checkout(1_000 + number)
        assert desk.fake.pay_session(topup.session_id or "", GOOD) is None
    await desk.pump.pump(is_adversarial=False)
    balance = await desk.balance()
    due = sum(1_000 + number for number in range(NUM_TOPUPS)) * CENT
    async with desk.sessions.begin() as session:
        await set_recharge(
            session,
            desk.organization_id,
            is_on=True,
            threshold_cents=100_000,
            amount_cents=700,
            month_cap_cents=700,
        )
        for number in range(NUM_MESSAGES):
            await outbox.promise(session, topic="nobody's", key=f"m{number}", payload={})
        await ledger.adjust_credit(
            session, desk.organization_id, -balance.posted, reason="x", actor="t", key="empty"
        )
    return due + 7 * DOLLAR


async def is_done(desk: Desk) -> bool:
    async with read_only(desk.sessions) as session:
        waiting = list(
            await session.scalars(select(StripeEvent).where(StripeEvent.processed_at.is_(None)))
        )
        unpaid = list(await session.scalars(select(Topup).where(Topup.state != "paid")))
        held = list(await session.scalars(select(HoldRecord).where(HoldRecord.state == "open")))
        recharges = list(await session.scalars(select(Topup).where(Topup.kind == "recharge")))
        tried = list(await session.scalars(select(OutboxMessage.attempts)))
    return not (waiting or unpaid or held) and bool(recharges) and min(tried) > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_workers_killed_at_random_lose_and_double_nothing(
    desk: Desk, books: Books, database_url: str, clean_redis: str, tmp_path: Path
) -> None:
    expected = await work_to_do(desk)
    writer = HoldWriter(desk.sessions)
    await writer.start()
    for _ in range(NUM_HOLDS):
        await writer.admit(books.admit(gateway="gw_lost"))
    paid_for = await writer.admit(books.admit())
    await writer.settle(settle_of(paid_for))
    await writer.stop()
    intervals = ("SWEEP", "OUTBOX", "STRIPE_INBOX", "RECHARGE", "RECONCILE", "LOW_BALANCE")
    environment = os.environ | {
        "NCOMPASS_DATABASE_URL": database_url,
        "NCOMPASS_REDIS_URL": clean_redis,
        "NCOMPASS_VAR": str(tmp_path),
        "STRIPE_API_KEY": API_KEY,
        "STRIPE_API_BASE": desk.fake.base_url,
        "NCOMPASS_BILLING_PAYMENT_SWEEP_EVERY_S": "1",
        **{f"NCOMPASS_BILLING_{name}_EVERY_S": "0.2" for name in intervals},
    }
    chance = random.Random(7)
    for kill in range(KILLS):
        with celery(environment) as process:
            await asyncio.sleep(chance.uniform(1.5, 3.5))
            if kill % 2:
                kill_a_child(process, chance)
                await asyncio.sleep(chance.uniform(0.1, 1.0))
    async with asyncio.timeout(90):
        with celery(environment):
            while not await is_done(desk):
                await asyncio.sleep(0.3)
    assert (await desk.balance()).posted == expected
    assert await desk.failed_checks() == []
    charges = desk.fake.state.all("charge")
    assert len(charges) == 1 + NUM_TOPUPS + 1
    async with read_only(desk.sessions) as session:
        keys = list(
            await session.scalars(
                select(LedgerTransaction.key).where(LedgerTransaction.kind == "topup")
            )
        )
        hours = sum(await session.scalars(select(UsageHour.requests)))
        records = len(list(await session.scalars(select(UsageRecord))))
    assert sorted(keys) == sorted(f"pi:{charge['payment_intent']}" for charge in charges)
    assert hours == records == NUM_HOLDS + 1
