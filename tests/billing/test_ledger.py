"""Postings, lots and what a balance below zero does to them."""

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from accounts.errors import OrganizationNotFound
from accounts.models import AuditEvent
from billing import chart, ledger
from billing.errors import InsufficientCredit, InvalidAmount, LedgerConflict
from billing.holds import HoldWriter
from billing.ledger import Posting
from billing.lots import LotKind
from billing.models import LedgerEntry
from billing.money import NANO_PER_DOLLAR
from billing.reconcile import reconcile
from common.db import read_only
from tests.billing.conftest import Books, settle_of

COST = 100 * 2_000 + 10 * 6_000


async def post(books: Books, amount: int, lot_kind: LotKind, key: str) -> None:
    async with books.sessions.begin() as session:
        await ledger.post(
            session,
            key=key,
            kind="test",
            organization_id=books.organization_id,
            postings=[
                Posting(chart.customer(books.organization_id), amount),
                Posting(chart.ADJUSTMENTS, -amount),
            ],
            actor="test",
            memo="test",
            lot_kind=lot_kind,
        )


async def account_sums(books: Books) -> dict[str, int]:
    sums: dict[str, int] = {}
    async with read_only(books.sessions) as session:
        for entry in await session.scalars(select(LedgerEntry)):
            sums[entry.account] = sums.get(entry.account, 0) + entry.amount_nano_usd
    return sums


async def test_free_credit_is_used_before_bought_credit_and_is_no_revenue(
    books: Books, writer: HoldWriter
) -> None:
    await post(books, 1_000_000, "paid", "top-up")
    await post(books, COST // 2 - NANO_PER_DOLLAR, "paid", "leave half a request of free credit")
    hold = await writer.admit(books.admit())
    await writer.settle(settle_of(hold))
    async with read_only(books.sessions) as session:
        balance = await ledger.balance(session, books.organization_id)
    assert (balance.promotional, balance.paid) == (0, 1_000_000 - COST // 2)
    sums = await account_sums(books)
    assert sums[chart.REVENUE] == COST // 2
    assert sums[chart.PROMOTIONAL_CONTRA] == COST // 2
    assert sum(sums.values()) == 0


async def test_taking_more_than_is_there_leaves_a_debt_that_new_credit_pays_first(
    books: Books, writer: HoldWriter
) -> None:
    await post(books, -NANO_PER_DOLLAR - 700, "paid", "take")
    with pytest.raises(InsufficientCredit) as refused:
        await writer.admit(books.admit())
    assert refused.value.facts["available"] == -700
    await post(books, 1_000, "promotional", "give")
    async with read_only(books.sessions) as session:
        balance = await ledger.balance(session, books.organization_id)
    assert (balance.posted, balance.promotional, balance.paid) == (300, 300, 0)


async def test_a_key_posts_once_and_for_one_thing(books: Books) -> None:
    await post(books, 500, "paid", "once")
    await post(books, 500, "paid", "once")
    with pytest.raises(LedgerConflict):
        await post(books, 501, "paid", "once")
    async with read_only(books.sessions) as session:
        balance = await ledger.balance(session, books.organization_id)
    assert balance.posted == NANO_PER_DOLLAR + 500


async def test_an_adjustment_has_a_reason_an_amount_and_a_witness(books: Books) -> None:
    async with books.sessions.begin() as session:
        for amount, reason in ((0, "zero"), (5, "  "), (2**63, "huge")):
            with pytest.raises(InvalidAmount):
                await ledger.adjust_credit(
                    session, books.organization_id, amount, reason=reason, actor="t", key="k"
                )
        with pytest.raises(OrganizationNotFound):
            await ledger.adjust_credit(session, "org_none", 5, reason="r", actor="t", key="k")
        await ledger.adjust_credit(
            session, books.organization_id, 5, reason="sorry", actor="support", key="k"
        )
    async with read_only(books.sessions) as session:
        events = await session.scalars(
            select(AuditEvent).where(AuditEvent.action == "credit.adjusted")
        )
        (event,) = events.all()
        assert event.facts["reason"] == "sorry"
        (latest, amount), *_ = await ledger.entries(session, books.organization_id, 10)
        assert (latest.memo, latest.actor, amount) == ("sorry", "support", 5)


async def test_postings_that_do_not_balance_are_refused(books: Books) -> None:
    with pytest.raises(InvalidAmount):
        async with books.sessions.begin() as session:
            await ledger.post(
                session,
                key="k",
                kind="test",
                organization_id=books.organization_id,
                postings=[Posting(chart.REVENUE, 5), Posting(chart.ADJUSTMENTS, -4)],
                actor="t",
                memo="t",
            )


async def test_an_unbalanced_transaction_is_refused_or_at_least_found(books: Books) -> None:
    """PostgreSQL refuses the commit; SQLite has no deferred triggers, so reconcile must find it."""
    async with books.sessions() as session:
        await session.execute(
            text(
                "INSERT INTO ledger_transactions VALUES ('t', 'k', 'test', :organization, 'a', 'm', 0)"
            ),
            {"organization": books.organization_id},
        )
        await session.execute(text("INSERT INTO ledger_entries VALUES ('t', 0, 'revenue', 1)"))
        if session.get_bind().dialect.name == "postgresql":
            with pytest.raises(IntegrityError, match="does not sum to zero"):
                await session.commit()
            return
        await session.commit()
        failed = {check.name for check in await reconcile(session) if not check.is_ok}
    assert "every transaction sums to zero" in failed
