"""Every check of the books is made to fail by the damage that it is there for."""

import asyncio
from typing import Any, cast

from sqlalchemy import CursorResult, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import chart, ledger, topups
from billing.holds import HoldWriter
from billing.ledger import Posting
from billing.reconcile import reconcile
from common.db import Sessions
from tests.billing.conftest import Books, settle_of

DAMAGE = {
    "transactions move their own customer's credit": (
        "UPDATE ledger_entries SET account = account || '_other' WHERE account LIKE 'customer:%'"
    ),
    "every transaction sums to zero": (
        "UPDATE ledger_entries SET amount_nano_usd = amount_nano_usd + 1 WHERE account = 'revenue'"
        " OR account = 'promotional_contra'"
    ),
    "balances equal the ledger": "UPDATE balances SET posted_nano_usd = posted_nano_usd + 1",
    "held equals the open holds": "UPDATE balances SET held_nano_usd = held_nano_usd + 1",
    "usage equals revenue and promotion": (
        "UPDATE usage_records SET charge_nano_usd = charge_nano_usd + 1 WHERE is_billable"
    ),
    "hourly usage equals the records": "UPDATE usage_hours SET output_tokens = output_tokens + 1",
    "credit lots equal the balances": (
        "UPDATE credit_lots SET remaining_nano_usd = remaining_nano_usd - 1"
    ),
    "credit lots equal their uses": "UPDATE lot_uses SET amount_nano_usd = amount_nano_usd + 1",
    "every closed hold has its usage record": ("DELETE FROM usage_records WHERE NOT is_billable"),
    "the clearing account equals the payments": (
        "UPDATE topups SET amount_cents = amount_cents + 1 WHERE state = 'paid'"
    ),
    "every charge is in the ledger once": (
        "UPDATE ledger_transactions SET key = 'elsewhere:' || key WHERE kind = 'usage'"
    ),
}


async def some_history(books: Books, writer: HoldWriter) -> None:
    """Requests of every fate: settled, voided, still open."""
    await pay_in(books)
    admitted = await asyncio.gather(*(writer.admit(books.admit()) for _ in range(12)))
    await asyncio.gather(
        *(writer.settle(settle_of(hold, 70, 30, 5)) for hold in admitted[:6]),
        *(writer.void(hold.request_id, hold.epoch, "platform_fault") for hold in admitted[6:9]),
    )


async def pay_in(books: Books) -> None:
    async with books.sessions.begin() as session:
        topup = await topups.start(
            session, books.organization_id, amount_cents=500, idempotency_key="click"
        )
        assert topup is not None
        topup.state = "paid"
        await ledger.post(
            session,
            key="pi:pi_1",
            kind="topup",
            organization_id=books.organization_id,
            postings=[
                Posting(chart.customer(books.organization_id), topup.amount_nano_usd),
                Posting(chart.STRIPE_CLEARING, -topup.amount_nano_usd),
            ],
            actor="test",
            memo="test",
        )


async def failed_checks(sessions: Sessions) -> set[str]:
    async with sessions.begin() as session:
        return {check.name for check in await reconcile(session) if not check.is_ok}


async def test_honest_books_pass_every_check(books: Books, writer: HoldWriter) -> None:
    await some_history(books, writer)
    assert await failed_checks(books.sessions) == set()
    async with books.sessions.begin() as session:
        assert {check.name for check in await reconcile(session)} == set(DAMAGE)


async def test_planted_damage_is_found_by_its_check(books: Books, writer: HoldWriter) -> None:
    await some_history(books, writer)
    for name, damage in DAMAGE.items():
        async with books.sessions() as session:
            await switch_triggers_off(session)
            changed = cast(CursorResult[Any], await session.execute(text(damage)))
            assert changed.rowcount > 0, f"the damage for {name!r} damages nothing"
            checks = await reconcile(session)
            assert [check.name for check in checks if check.name == name and check.is_ok] == []
            await session.rollback()
    assert await failed_checks(books.sessions) == set()


async def switch_triggers_off(session: AsyncSession) -> None:
    """For this transaction: damage is what the triggers are there to prevent."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(text("SET LOCAL session_replication_role = replica"))
        return
    names = await session.scalars(text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
    for name in names.all():
        await session.execute(text(f"DROP TRIGGER {name}"))
