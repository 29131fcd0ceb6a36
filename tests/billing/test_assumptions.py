"""Admissions that are written without a look at the books first are as exact as those that look."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import func, select, update

from accounts import api_keys, projects
from accounts.errors import InvalidKey, KeyExpired, KeyRevoked, OrganizationFrozen
from accounts.models import ApiKey, Organization
from billing import book_reader, budgets, ledger
from billing.errors import BudgetExceeded, HoldConflict, InsufficientCredit
from billing.holds import HoldWriter
from billing.models import HoldRecord
from billing.money import NANO_PER_DOLLAR
from billing.reconcile import reconcile
from common.db import read_only
from tests.billing.conftest import Books

COST = 100 * 2_000 + 10 * 6_000
Change = Callable[[Books], Awaitable[Any]]


async def held(books: Books) -> int:
    """What the holds of everybody come to; the balances must say the same."""
    async with read_only(books.sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []
        return await session.scalar(select(func.sum(HoldRecord.amount_nano_usd))) or 0


async def freeze(books: Books) -> None:
    async with books.sessions.begin() as session:
        organization = await session.get_one(Organization, books.organization_id)
        organization.status = "frozen"


async def revoke(books: Books) -> None:
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)


async def expire(books: Books) -> None:
    async with books.sessions.begin() as session:
        await session.execute(update(ApiKey).values(expires_at=1))


async def bound_key(books: Books) -> None:
    async with books.sessions.begin() as session:
        await budgets.set_budget(
            session,
            books.organization_id,
            api_key_id=books.customer.issued_key.key.id,
            limit_nano_usd=COST,
            period="total",
        )


async def bound_project(books: Books) -> None:
    async with books.sessions.begin() as session:
        project = await projects.create_project(session, books.organization_id, name="p")
        await session.execute(update(ApiKey).values(project_id=project.id))
        await budgets.set_budget(
            session,
            books.organization_id,
            project_id=project.id,
            limit_nano_usd=COST,
            period="total",
        )


async def spend(books: Books) -> None:
    async with books.sessions.begin() as session:
        change = -NANO_PER_DOLLAR + COST
        owner = books.organization_id
        await ledger.adjust_credit(session, owner, change, reason="t", actor="t", key="spend")


async def test_an_ordinary_admission_reads_nothing_first(
    books: Books, writer: HoldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await writer.admit(books.admit())  # and its price is known
    monkeypatch.setattr(book_reader, "read", None)
    holds = await asyncio.gather(*(writer.admit(books.admit()) for _ in range(5)))
    assert [hold.authorized_output_tokens for hold in holds] == [10] * 5
    assert await held(books) == 6 * COST


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (freeze, OrganizationFrozen),
        (revoke, KeyRevoked),
        (expire, KeyExpired),
        (bound_key, BudgetExceeded),
        (bound_project, BudgetExceeded),
        (spend, InsufficientCredit),
    ],
)
async def test_what_is_not_as_assumed_is_found(
    books: Books, writer: HoldWriter, change: Change, refusal: type[Exception]
) -> None:
    await writer.admit(books.admit())
    await change(books)
    other = await books.sign_up("bob@example.com", credit=NANO_PER_DOLLAR)
    innocent = books.admit(
        organization_id=other.organization.id, api_key_id=other.issued_key.key.id
    )
    for _ in range(2):  # at first assumed, then known
        refused, admitted = await asyncio.gather(
            writer.admit(books.admit()), writer.admit(innocent), return_exceptions=True
        )
        assert isinstance(refused, refusal)
        assert not isinstance(admitted, BaseException)
    assert await held(books) == 2 * COST


async def test_a_key_of_somebody_else_is_found(books: Books, writer: HoldWriter) -> None:
    other = await books.sign_up("bob@example.com", credit=NANO_PER_DOLLAR)
    await writer.admit(books.admit())
    theirs = books.admit(api_key_id=other.issued_key.key.id)
    with pytest.raises(InvalidKey):
        await writer.admit(theirs)
    ours = books.admit(organization_id=other.organization.id, api_key_id=theirs.api_key_id)
    refused, admitted = await asyncio.gather(
        writer.admit(theirs), writer.admit(ours), return_exceptions=True
    )
    assert isinstance(refused, InvalidKey)
    assert not isinstance(admitted, BaseException)
    assert await held(books) == 2 * COST


async def test_an_admission_that_is_repeated_is_the_first_one(
    books: Books, writer: HoldWriter
) -> None:
    await writer.admit(books.admit())
    admit = books.admit()
    first = await writer.admit(admit)
    assert await writer.admit(admit) == first
    with pytest.raises(HoldConflict):
        await writer.admit(books.admit(request_id=admit.request_id, prompt=7))
    assert await held(books) == 2 * COST


async def test_what_fits_is_held_where_not_all_does(books: Books, writer: HoldWriter) -> None:
    await writer.admit(books.admit())
    await spend(books)
    async with books.sessions.begin() as session:
        owner, more = books.organization_id, 100 * 2_000 + 8 * 6_000
        await ledger.adjust_credit(session, owner, more, reason="t", actor="t", key="more")
    assert (await writer.admit(books.admit())).authorized_output_tokens == 8
    with pytest.raises(InsufficientCredit):
        await writer.admit(books.admit(prompt=1, output=1))


async def test_many_writers_never_pass_the_balance(books: Books) -> None:
    writers = [HoldWriter(books.sessions) for _ in range(3)]
    for writer in writers:
        await writer.start()
        await writer.admit(books.admit())
    room = (NANO_PER_DOLLAR - 3 * COST) // (100 * COST)
    admits = [books.admit(prompt=100 * 100, output=100 * 10) for _ in range(room + 40)]
    results = await asyncio.gather(
        *(writers[index % 3].admit(admit) for index, admit in enumerate(admits)),
        return_exceptions=True,
    )
    for writer in writers:
        await writer.stop()
    assert {type(one) for one in results if isinstance(one, BaseException)} == {InsufficientCredit}
    assert NANO_PER_DOLLAR - await held(books) < 10_000 * 2_000 + 6_000
