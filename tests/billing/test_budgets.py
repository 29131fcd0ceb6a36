"""Budgets of keys and projects: as exact as the balance, whatever runs at once."""

import asyncio

import pytest
from sqlalchemy import update

from accounts import api_keys, projects
from accounts.errors import KeyNotFound, ProjectNotFound
from accounts.models import ApiKey
from billing import budgets, pricing
from billing.budgets import Period
from billing.errors import BudgetExceeded, InsufficientCredit, InvalidAmount, InvalidPrice
from billing.holds import HoldWriter
from billing.models import Budget
from billing.money import NANO_PER_DOLLAR
from billing.reconcile import reconcile
from common.clock import utc_now_us
from common.db import read_only
from tests.billing.conftest import INPUT, MODEL, OUTPUT, Books, settle_of

COST = 100 * 2_000 + 10 * 6_000
MONTH_US = 31 * 86_400 * 1_000_000


async def bound(
    books: Books, limit: int, *, project: str | None = None, period: Period = "month"
) -> Budget:
    async with books.sessions.begin() as session:
        return await budgets.set_budget(
            session,
            books.organization_id,
            api_key_id=None if project else books.customer.issued_key.key.id,
            project_id=project,
            limit_nano_usd=limit,
            period=period,
        )


async def project_with_keys(books: Books) -> tuple[str, list[str]]:
    async with books.sessions.begin() as session:
        project = await projects.create_project(session, books.organization_id, name="p")
        issued = [
            await api_keys.issue(
                session,
                books.organization_id,
                name="k",
                scopes=["inference"],
                created_by=None,
                key_ring=books.key_ring,
                project_id=project.id,
            )
            for _ in range(2)
        ]
    return project.id, [one.key.id for one in issued]


async def test_many_at_once_never_pass_a_budget(books: Books) -> None:
    """Two gateways, forty requests, room for five."""
    await bound(books, 5 * COST + 10)
    writers = [HoldWriter(books.sessions), HoldWriter(books.sessions)]
    for one in writers:
        await one.start()
    admits = [writers[i % 2].admit(books.admit()) for i in range(40)]
    results = await asyncio.gather(*admits, return_exceptions=True)
    for one in writers:
        await one.stop()
    admitted = [result for result in results if not isinstance(result, BaseException)]
    assert len(admitted) == 5
    assert all(isinstance(r, BudgetExceeded) for r in results if isinstance(r, BaseException))


async def test_a_project_bounds_all_of_its_keys_together(books: Books, writer: HoldWriter) -> None:
    project, keys = await project_with_keys(books)
    await bound(books, 3 * COST, project=project)
    holds = await asyncio.gather(
        *(writer.admit(books.admit(api_key_id=keys[i % 2])) for i in range(6)),
        return_exceptions=True,
    )
    assert sum(not isinstance(hold, BaseException) for hold in holds) == 3
    await writer.admit(books.admit())  # another key of the organization is not bound


async def test_what_was_settled_counts_and_what_was_freed_does_not(
    books: Books, writer: HoldWriter
) -> None:
    await bound(books, 2 * COST)
    first, second = await writer.admit(books.admit()), await writer.admit(books.admit())
    with pytest.raises(BudgetExceeded) as refused:
        await writer.admit(books.admit())
    assert refused.value.facts["available"] == 0
    await writer.void(first.request_id, first.epoch, "platform_fault")
    await writer.settle(settle_of(second, 50, 50, 5))
    spent = 50 * 2_000 + 50 * 500 + 5 * 6_000
    async with read_only(books.sessions) as session:
        ((_, stand),) = await budgets.list_budgets(session, books.organization_id)
        assert [check for check in await reconcile(session) if not check.is_ok] == []
    assert (stand.spent_nano_usd, stand.held_nano_usd) == (spent, 0)
    left = 2 * COST - spent
    fitting = (left - 100 * 2_000) // 6_000
    hold = await writer.admit(books.admit(output=1_000))
    assert hold.authorized_output_tokens == fitting


async def test_an_extension_stays_within_the_budget(books: Books, writer: HoldWriter) -> None:
    await bound(books, COST + 5 * 6_000)
    hold = await writer.admit(books.admit())
    with pytest.raises(BudgetExceeded):
        await writer.extend(hold.request_id, hold.epoch, 16)
    extended = await writer.extend(hold.request_id, hold.epoch, 15)
    assert extended.authorized_output_tokens == 15


async def test_the_tighter_of_balance_and_budget_speaks(books: Books, writer: HoldWriter) -> None:
    await bound(books, 2 * NANO_PER_DOLLAR)
    with pytest.raises(InsufficientCredit) as refused:
        await writer.admit(books.admit(prompt=10**6))
    assert not isinstance(refused.value, BudgetExceeded)


async def test_a_month_begins_anew_and_a_total_does_not(books: Books) -> None:
    now = [utc_now_us()]
    writer = HoldWriter(books.sessions, clock=lambda: now[0])
    await writer.start()
    await bound(books, COST)
    await writer.settle(settle_of(await writer.admit(books.admit())))
    with pytest.raises(BudgetExceeded):
        await writer.admit(books.admit())
    now[0] += MONTH_US
    await writer.settle(settle_of(await writer.admit(books.admit())))
    await bound(books, 2 * COST, period="total")
    now[0] += 20 * MONTH_US
    with pytest.raises(BudgetExceeded):
        await writer.admit(books.admit())
    await writer.stop()


async def test_a_budget_counts_what_ran_before_it_was_set_and_may_be_lifted(
    books: Books, writer: HoldWriter
) -> None:
    await writer.admit(books.admit())
    budget = await bound(books, COST)
    assert (await bound(books, COST, period="day")).id == budget.id
    with pytest.raises(BudgetExceeded):
        await writer.admit(books.admit())
    async with books.sessions.begin() as session:
        await budgets.remove_budget(session, "org_other", budget.id)
    with pytest.raises(BudgetExceeded):
        await writer.admit(books.admit())
    async with books.sessions.begin() as session:
        await budgets.remove_budget(session, books.organization_id, budget.id)
    await writer.admit(books.admit())


async def test_a_budget_is_for_ones_own_things(books: Books) -> None:
    other = await books.sign_up("other@example.com")
    project, _ = await project_with_keys(books)
    async with books.sessions() as session:
        with pytest.raises(KeyNotFound):
            await budgets.set_budget(
                session,
                other.organization.id,
                api_key_id=books.customer.issued_key.key.id,
                limit_nano_usd=1,
                period="day",
            )
        with pytest.raises(ProjectNotFound):
            await budgets.set_budget(
                session, other.organization.id, project_id=project, limit_nano_usd=1, period="day"
            )
        with pytest.raises(ProjectNotFound):
            await api_keys.issue(
                session,
                other.organization.id,
                name="k",
                scopes=["inference"],
                created_by=None,
                key_ring=books.key_ring,
                project_id=project,
            )
    with pytest.raises(InvalidAmount):
        await bound(books, -1)


async def test_a_promotion_ends_by_itself_and_changes_no_running_request(books: Books) -> None:
    now = [utc_now_us() + 1_000_000]

    async def price() -> int:
        async with read_only(books.sessions) as session:
            found = await pricing.current_price(session, MODEL, clock=lambda: now[0])
            return found.output_nano_usd_per_million

    writer = HoldWriter(books.sessions, clock=lambda: now[0])
    await writer.start()
    before = await writer.admit(books.admit())
    end = now[0] + 86_400 * 1_000_000
    async with books.sessions.begin() as session:
        with pytest.raises(InvalidPrice):
            await pricing.promote(
                session, MODEL, input=1, cached=1, output=1, until=now[0], clock=lambda: now[0]
            )
        promotional, _ = await pricing.promote(
            session,
            MODEL,
            input=INPUT // 2,
            cached=0,
            output=OUTPUT // 2,
            until=end,
            clock=lambda: now[0],
        )
        with pytest.raises(InvalidPrice):
            await pricing.promote(
                session, MODEL, input=1, cached=1, output=1, until=end + 1, clock=lambda: now[0]
            )
    assert await price() == OUTPUT // 2
    during = await writer.admit(books.admit(price_id=promotional.id))
    now[0] = end
    assert await price() == OUTPUT
    assert (await writer.settle(settle_of(before))).charge_nano_usd == COST
    assert (await writer.settle(settle_of(during))).charge_nano_usd == COST // 2
    await writer.stop()


async def test_a_key_that_changes_nothing_else_has_no_budget(
    books: Books, writer: HoldWriter
) -> None:
    """A project without a budget, and a key that left it, are bound by the balance alone."""
    project, keys = await project_with_keys(books)
    await writer.admit(books.admit(api_key_id=keys[0]))
    await bound(books, 0, project=project)
    with pytest.raises(BudgetExceeded):
        await writer.admit(books.admit(api_key_id=keys[0]))
    async with books.sessions.begin() as session:
        await session.execute(update(ApiKey).where(ApiKey.id == keys[0]).values(project_id=None))
    await writer.admit(books.admit(api_key_id=keys[0]))
