"""Who waits for credit is woken once there is enough, in order, and costs nothing meanwhile."""

import asyncio

import pytest

from billing.credit_watch import CreditWatch
from common.db import Sessions
from tests.billing.conftest import Books
from tests.billing.test_holds import set_credit


async def started(watch: CreditWatch, books: Books, *required: int) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.create_task(watch.wait(books.organization_id, amount)) for amount in required]
    await asyncio.sleep(0)
    return tasks


async def woken(tasks: list["asyncio.Task[None]"]) -> list[bool]:
    await asyncio.sleep(0.01)
    return [task.done() for task in tasks]


async def test_as_many_are_woken_as_the_credit_covers_the_first_ones_first(books: Books) -> None:
    await set_credit(books, 100)
    watch = CreditWatch(books.sessions)
    tasks = await started(watch, books, 60, 50, 40, 1)
    await watch.look()
    assert await woken(tasks) == [True, False, True, False]
    await watch.look()
    assert all(await woken(tasks))


async def test_enough_is_exactly_what_is_required(books: Books) -> None:
    await set_credit(books, 100)
    watch = CreditWatch(books.sessions)
    tasks = await started(watch, books, 101)
    await watch.look()
    assert await woken(tasks) == [False]
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    tasks = await started(watch, books, 100)
    await watch.look()
    assert await woken(tasks) == [True]


async def test_credit_of_one_organization_wakes_no_other(books: Books) -> None:
    other = await books.sign_up("eve@example.com", credit=10)
    watch = CreditWatch(books.sessions)
    poor = asyncio.create_task(watch.wait(other.organization.id, 11))
    stranger = asyncio.create_task(watch.wait("org_unknown", 1))
    rich = await started(watch, books, 11)
    await watch.look()
    assert await woken([poor, stranger, *rich]) == [False, False, True]
    for task in (poor, stranger):
        task.cancel()


async def test_nothing_is_asked_while_nobody_waits() -> None:
    def untouchable() -> None:
        raise AssertionError("the database was asked")

    await CreditWatch(untouchable).look()  # type: ignore[arg-type]  # a Sessions that refuses


async def test_those_who_stop_waiting_are_forgotten(books: Books, sessions: Sessions) -> None:
    watch = CreditWatch(sessions)
    tasks = await started(watch, books, 10**18, 10**18)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert watch.num_waiting == 0
