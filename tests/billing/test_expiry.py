"""Credit that ends: what expires first is used first, and what is held stays until it is free."""

import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from billing import chart, expiry, ledger, lots
from billing.holds import HoldWriter
from billing.ledger import Posting
from billing.reconcile import reconcile
from billing.settings import BillingSettings
from billing.signup import sign_up
from common.clock import utc_now_us
from common.db import read_only
from tests.billing.conftest import ACCOUNTS, Books, settle_of
from tests.billing.faults import Fault, FaultyBegin

DAY_US = 86_400_000_000
GIFT = 1_000_000


async def give(books: Books, name: str, days: int) -> int:
    """A gift that ends after so many days; returns when."""
    ends_at = utc_now_us() + days * DAY_US
    async with books.sessions.begin() as session:
        await ledger.post(
            session,
            key=f"gift:{name}",
            kind="gift",
            organization_id=books.organization_id,
            postings=[
                Posting(chart.customer(books.organization_id), GIFT),
                Posting(chart.PROMOTIONAL_EXPENSE, -GIFT),
            ],
            actor="test",
            memo=name,
            lot_kind="promotional",
            expires_at=ends_at,
        )
    return ends_at


async def posted(books: Books) -> int:
    async with read_only(books.sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []
        return (await ledger.balance(session, books.organization_id)).posted


async def test_what_is_left_of_a_lot_goes_when_its_time_is_over_and_once(books: Books) -> None:
    before = await posted(books)
    ends_at = await give(books, "short", 1)
    assert await expiry.sweep(books.sessions) == 0
    assert await posted(books) == before + GIFT
    at_end = await asyncio.gather(
        *(expiry.sweep(books.sessions, clock=lambda: ends_at) for _ in range(3))
    )
    assert sum(at_end) == 1
    assert await posted(books) == before


async def test_what_ends_first_is_used_first(books: Books, writer: HoldWriter) -> None:
    before = await posted(books)
    late = await give(books, "late", 9)
    await give(books, "soon", 1)
    async with read_only(books.sessions) as session:
        ending = await lots.next_end(session, books.organization_id)
    assert ending is not None
    assert (ending.amount_nano_usd, ending.ends_at < late) == (GIFT, True)
    hold = await writer.admit(books.admit())
    charge = (await writer.settle(settle_of(hold))).charge_nano_usd
    assert 0 < charge < GIFT
    assert await expiry.sweep(books.sessions, clock=lambda: late - 1) == 1
    assert await posted(books) == before + GIFT  # the charge was paid by what has ended now
    assert await expiry.sweep(books.sessions, clock=lambda: late) == 1
    assert await posted(books) == before


async def test_what_running_requests_hold_stays_until_they_end(
    books: Books, writer: HoldWriter
) -> None:
    async with books.sessions.begin() as session:
        left = (await ledger.balance(session, books.organization_id)).posted
        await ledger.adjust_credit(
            session,
            books.organization_id,
            amount=-left,
            reason="only the gift is left",
            actor="test",
            key="empty",
        )
    ends_at = await give(books, "short", 1)
    hold = await writer.admit(books.admit())
    for _ in range(2):
        await expiry.sweep(books.sessions, clock=lambda: ends_at)
        async with read_only(books.sessions) as session:
            balance = await ledger.balance(session, books.organization_id)
        assert (balance.posted, balance.available) == (hold.amount_nano_usd, 0)
    settlement = await writer.settle(settle_of(hold, output=5))
    assert settlement.charge_nano_usd < hold.amount_nano_usd
    assert await expiry.sweep(books.sessions, clock=lambda: ends_at) == 1
    assert await posted(books) == 0


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_crash_around_the_commit_takes_the_credit_once(books: Books, fault: Fault) -> None:
    before = await posted(books)
    ends_at = await give(books, "short", 1)
    faulty = FaultyBegin(books.sessions, [fault])
    with pytest.raises(OperationalError, match="lost"):
        await expiry.sweep(faulty, clock=lambda: ends_at)  # type: ignore[arg-type]  # stands for Sessions
    await expiry.sweep(books.sessions, clock=lambda: ends_at)
    assert await posted(books) == before


async def test_the_free_credit_may_end(books: Books) -> None:
    settings = BillingSettings(signup_credit_nano_usd=GIFT, signup_credit_days=30)
    async with books.sessions.begin() as session:
        signed_up = await sign_up(
            session,
            email="grace@example.com",
            password="a long enough password",
            hasher=books.hasher,
            key_ring=books.key_ring,
            accounts_settings=ACCOUNTS,
            billing_settings=settings,
        )
    now = utc_now_us()
    assert await expiry.sweep(books.sessions, clock=lambda: now + 29 * DAY_US) == 0
    assert await expiry.sweep(books.sessions, clock=lambda: now + 31 * DAY_US) == 1
    async with read_only(books.sessions) as session:
        assert (await ledger.balance(session, signed_up.organization.id)).posted == 0


async def test_an_expiry_takes_from_its_own_lot_though_usage_would_take_from_another(
    books: Books,
) -> None:
    async with read_only(books.sessions) as session:
        before = await ledger.balance(session, books.organization_id)
    ends_at = utc_now_us() + DAY_US
    async with books.sessions.begin() as session:
        await ledger.post(
            session,
            key="bought",
            kind="test",
            organization_id=books.organization_id,
            postings=[
                Posting(chart.customer(books.organization_id), GIFT),
                Posting(chart.STRIPE_CLEARING, -GIFT),
            ],
            actor="test",
            memo="bought, and it ends",
            expires_at=ends_at,
        )
    assert await expiry.sweep(books.sessions, clock=lambda: ends_at) == 1
    async with read_only(books.sessions) as session:
        assert await ledger.balance(session, books.organization_id) == before
