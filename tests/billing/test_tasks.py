"""Celery's tasks, by hand and by a real worker with its beat."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accounts import verification
from billing import ledger, sweeps, tasks
from billing.celery_app import TASK_TIME_LIMIT_S, VISIBILITY_TIMEOUT_S, create_celery
from billing.holds import HoldWriter
from billing.reconcile import reconcile
from billing.settings import BillingSettings
from common.db import read_only
from common.settings import CommonSettings
from tests.billing.conftest import Books
from tests.billing.fake_stripe.server import API_KEY
from tests.billing.fake_stripe.state import GOOD
from tests.billing.payments import DOLLAR, Desk, desk, fake, running_stripe

__all__ = ["desk", "fake", "running_stripe"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCOMPASS_DATABASE_URL", database_url)


async def held(books: Books) -> int:
    async with read_only(books.sessions) as session:
        return (await ledger.balance(session, books.organization_id)).held


@pytest.mark.usefixtures("environment")
async def test_the_sweep_run_twice_frees_a_lost_hold_once(books: Books, writer: HoldWriter) -> None:
    await writer.admit(books.admit(gateway="gw_lost"))
    assert await held(books) > 0
    await asyncio.to_thread(tasks.close_lost_gateways)
    await asyncio.to_thread(tasks.close_lost_gateways)
    assert await held(books) == 0
    async with read_only(books.sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []


async def test_sweeps_at_the_same_moment_do_not_meet(books: Books, writer: HoldWriter) -> None:
    await asyncio.gather(*(writer.admit(books.admit(gateway="gw_lost")) for _ in range(30)))
    closed = await asyncio.gather(*(sweeps.close_all_lost(books.sessions) for _ in range(4)))
    assert sum(closed) == 30
    assert await held(books) == 0


def logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    """What the tasks logged: printed, or handed to logging once a test has configured structlog."""
    return capsys.readouterr().out + caplog.text


@pytest.mark.usefixtures("environment")
async def test_books_that_differ_are_an_error_in_the_log(
    books: Books, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(tasks.reconcile_books)
    assert "books_differ" not in logged(capsys, caplog)
    async with books.sessions.begin() as session:
        connection = await session.connection()
        await connection.exec_driver_sql("UPDATE balances SET held_nano_usd = 7")
    await asyncio.to_thread(tasks.reconcile_books)
    assert "books_differ" in logged(capsys, caplog)


@pytest.mark.usefixtures("environment")
async def test_the_relay_sends_the_verification_mail(
    books: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    async with books.sessions.begin() as session:
        await verification.request(session, books.customer.user)
    await asyncio.to_thread(tasks.relay_outbox)
    await asyncio.to_thread(tasks.relay_outbox)
    assert capsys.readouterr().err.count("/verify?token=") == 1
    await asyncio.to_thread(tasks.purge_expired)


def test_every_task_of_the_beat_exists() -> None:
    schedule = create_celery(CommonSettings(), BillingSettings()).conf.beat_schedule
    assert {entry["task"] for entry in schedule.values()} == {
        name for name in tasks.app.tasks if name.startswith("billing.")
    }


@pytest.mark.usefixtures("environment")
async def test_without_a_key_the_tasks_of_payments_do_nothing(books: Books) -> None:
    for task in (
        tasks.process_stripe_inbox,
        tasks.recharge_due,
        tasks.sweep_payments,
        tasks.compare_with_stripe,
    ):
        await asyncio.to_thread(task)


@pytest.mark.usefixtures("environment")
async def test_the_tasks_of_payments_bring_a_payment_home(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", API_KEY)
    monkeypatch.setenv("STRIPE_API_BASE", desk.fake.base_url)
    topup = await desk.open_checkout()
    desk.fake.pay_session(topup.session_id or "", GOOD)
    for _ in range(2):
        await asyncio.to_thread(tasks.sweep_payments)
        await asyncio.to_thread(tasks.process_stripe_inbox)
    await asyncio.to_thread(tasks.recharge_due)
    await asyncio.to_thread(tasks.warn_low_balances)
    assert (await desk.balance()).posted == 50 * DOLLAR
    await asyncio.to_thread(tasks.compare_with_stripe)
    assert "books_differ" not in logged(capsys, caplog)
    desk.fake.state.move("charge", 1)
    await asyncio.to_thread(tasks.compare_with_stripe)
    assert "books_differ" in logged(capsys, caplog)


def test_a_task_that_still_runs_is_never_handed_to_a_second_worker() -> None:
    conf = create_celery(CommonSettings(), BillingSettings()).conf
    assert TASK_TIME_LIMIT_S < VISIBILITY_TIMEOUT_S
    assert conf.broker_transport_options["visibility_timeout"] == VISIBILITY_TIMEOUT_S
    assert (conf.task_acks_late, conf.task_reject_on_worker_lost) == (True, True)
    assert (conf.worker_prefetch_multiplier, conf.task_ignore_result) == (1, True)
    for entry in conf.beat_schedule.values():
        assert entry["options"]["expires"] <= entry["schedule"]
        assert set(entry["options"]) == {"expires"}


def test_no_task_is_sent_for_later() -> None:
    """celery 2599: a task with an ETA beyond the visibility timeout runs many times."""
    for package in ("billing", "accounts", "api", "web", "infra", "common"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"apply_async|\.delay\(|countdown=|\beta=", text), path


@pytest.mark.slow
async def test_a_real_worker_with_its_beat_sweeps(
    books: Books, writer: HoldWriter, database_url: str, clean_redis: str, tmp_path: Path
) -> None:
    await writer.admit(books.admit(gateway="gw_lost"))
    command = [sys.executable, "-m", "celery", "-A", "billing.celery_app", "worker", "-B"]
    worker = subprocess.Popen(
        [*command, "--concurrency", "1", "--without-gossip", "--without-mingle"],
        env=os.environ
        | {
            "NCOMPASS_DATABASE_URL": database_url,
            "NCOMPASS_REDIS_URL": clean_redis,
            "NCOMPASS_VAR": str(tmp_path),
            "NCOMPASS_BILLING_SWEEP_EVERY_S": "0.5",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while await held(books) and time.monotonic() < deadline:
            assert worker.poll() is None
            await asyncio.sleep(0.1)
        assert await held(books) == 0
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait, 20)
