"""kill -9 of gateways in full flight: what customers were told is billed, once; the rest is free."""

import asyncio
import subprocess
import sys
import time

import pytest
from sqlalchemy import func, select

from billing import ledger
from billing.models import HoldRecord, UsageRecord
from billing.reconcile import reconcile
from billing.sweeps import close_all_lost
from common.db import read_only
from tests.billing.conftest import MODEL, Books

CHARGE = 90 * 2_000 + 10 * 500 + 5 * 6_000


@pytest.mark.slow
async def test_killed_gateways_leave_books_that_balance(books: Books, database_url: str) -> None:
    command = [sys.executable, "-m", "tests.billing.spender", database_url, books.organization_id]
    command += [books.price_id, MODEL]
    spenders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    told: dict[str, int] = {}
    for spender in spenders:
        told |= await asyncio.to_thread(listen_then_kill, spender)
    assert len(told) >= 40
    deadline = time.monotonic() + 20
    while await num_open(books) and time.monotonic() < deadline:
        await close_all_lost(books.sessions)
        await asyncio.sleep(0.1)
    assert await num_open(books) == 0
    async with read_only(books.sessions) as session:
        charges = await session.execute(
            select(UsageRecord.request_id, UsageRecord.charge_nano_usd).where(
                UsageRecord.is_billable
            )
        )
        billed = {row.request_id: row.charge_nano_usd for row in charges}
        balance = await ledger.balance(session, books.organization_id)
        assert [check for check in await reconcile(session) if not check.is_ok] == []
    # Everything that a customer heard of is billed; at most what was being written when the
    # process died is billed without the customer having heard.
    assert told.items() <= billed.items()
    assert set(billed.values()) == {CHARGE}
    assert len(billed) - len(told) <= 2 * 16
    assert balance.held == 0
    assert balance.posted == 1_000_000_000 - CHARGE * len(billed)


def listen_then_kill(spender: "subprocess.Popen[str]") -> dict[str, int]:
    """Hear of twenty settlements, kill the process in the middle of more, read what it had said."""
    assert spender.stdout is not None
    lines = [spender.stdout.readline() for _ in range(20)]
    spender.kill()
    lines += spender.stdout.readlines()
    spender.stdout.close()
    spender.wait(timeout=10)
    whole = [line.split() for line in lines if line.endswith("\n")]
    return {request_id: int(charge) for request_id, charge in whole}


async def num_open(books: Books) -> int:
    async with read_only(books.sessions) as session:
        count = select(func.count()).select_from(HoldRecord).where(HoldRecord.state == "open")
        return await session.scalar(count) or 0
