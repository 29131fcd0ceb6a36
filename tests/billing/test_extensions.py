"""Extensions of holds: exact on a nearly empty balance, whatever dies before or after a commit."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from billing import budgets, holds, ledger
from billing.errors import (
    BudgetExceeded,
    HoldExceeded,
    HoldFenced,
    InsufficientCredit,
    LedgerUnavailable,
)
from billing.gateways import GatewayLease
from billing.holds import Hold, HoldWriter
from billing.models import HoldRecord
from billing.reconcile import reconcile
from billing.sweeps import close_all_lost
from common.db import Sessions, create_engine, read_only
from tests.billing.conftest import INPUT, MODEL, OUTPUT, Books, settle_of
from tests.billing.faults import Fault, Faults
from tests.billing.test_holds import balance_of, set_credit

PROMPT_COST, TOKEN_COST = 100 * 2_000, 6_000
assert (INPUT, OUTPUT, MODEL) == (2_000 * 10**6, TOKEN_COST * 10**6, "owner/model")


def cost_of(output: int) -> int:
    return PROMPT_COST + output * TOKEN_COST


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def faulty(
    database_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HoldWriter]:
    """A writer whose commits suffer what is planned."""
    monkeypatch.setattr(holds, "FIRST_PAUSE_S", 0.01)
    engine = create_engine(database_url)
    writer = HoldWriter(faults.sessions(engine))
    await writer.start()
    yield writer
    await writer.stop()
    await engine.dispose()


async def assert_reconciled(sessions: Sessions) -> None:
    async with read_only(sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []


async def authorized(books: Books, hold: Hold) -> int:
    async with read_only(books.sessions) as session:
        return (await session.get_one(HoldRecord, hold.request_id)).authorized_output_tokens


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_an_extension_without_an_answer_is_asked_again_and_counts_once(
    books: Books, faulty: HoldWriter, faults: Faults, fault: Fault
) -> None:
    await set_credit(books, cost_of(20))
    hold = await faulty.admit(books.admit())
    faults.planned.append(fault)
    with pytest.raises(LedgerUnavailable):
        await faulty.extend(hold.request_id, hold.epoch, 20)
    await assert_reconciled(books.sessions)
    for _ in range(2):
        extended = await faulty.extend(hold.request_id, hold.epoch, 20)
        assert extended.authorized_output_tokens == 20
        assert (await balance_of(books)).available == 0
    assert (await faulty.settle(settle_of(extended, output=20))).charge_nano_usd == cost_of(20)
    assert (await balance_of(books)).posted == 0
    await assert_reconciled(books.sessions)


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_gateway_that_dies_in_an_extension_leaves_nothing_held(
    books: Books, faulty: HoldWriter, faults: Faults, fault: Fault
) -> None:
    """Whichever fence the table says, the sweeper frees what is held up to there."""
    lease = GatewayLease(books.sessions, "gw_test")
    await lease.renew()
    before = await balance_of(books)
    hold = await faulty.admit(books.admit())
    faults.planned.append(fault)
    with pytest.raises(LedgerUnavailable):
        await faulty.extend(hold.request_id, hold.epoch, 500)
    assert await authorized(books, hold) == (500 if fault == "after" else 10)
    await lease.release()
    assert await close_all_lost(books.sessions) == 1
    assert await balance_of(books) == before
    with pytest.raises(HoldFenced):
        await faulty.extend(hold.request_id, hold.epoch, 600)
    await assert_reconciled(books.sessions)


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_what_was_told_before_the_fault_may_be_settled_whatever_was_committed(
    books: Books, faulty: HoldWriter, faults: Faults, fault: Fault
) -> None:
    hold = await faulty.admit(books.admit())
    faults.planned.append(fault)
    with pytest.raises(LedgerUnavailable):
        await faulty.extend(hold.request_id, hold.epoch, 500)
    assert (await faulty.settle(settle_of(hold, output=10))).charge_nano_usd == cost_of(10)
    assert (await balance_of(books)).held == 0
    await assert_reconciled(books.sessions)


async def test_a_group_that_fails_as_a_whole_extends_each_by_itself(
    books: Books, faulty: HoldWriter, faults: Faults
) -> None:
    """Some extensions are covered and some are not; a poisoned admission shares their commit."""
    await set_credit(books, 5 * cost_of(10) + 2 * 10 * TOKEN_COST)
    held = [await faulty.admit(books.admit()) for _ in range(5)]
    poisoned = faulty.admit(books.admit(output=1, prompt=0, gateway=None))
    extensions = [faulty.extend(hold.request_id, hold.epoch, 20) for hold in held]
    *results, poison = await asyncio.gather(*extensions, poisoned, return_exceptions=True)
    assert not isinstance(poison, Hold)
    granted = [result for result in results if isinstance(result, Hold)]
    assert [hold.authorized_output_tokens for hold in granted] == [20, 20]
    assert sum(isinstance(result, InsufficientCredit) for result in results) == 3
    assert (await balance_of(books)).available == 0
    await assert_reconciled(books.sessions)


async def test_two_gateways_extending_at_once_never_oversell(books: Books) -> None:
    """Forty holds of one token each, and credit for a hundred tokens more."""
    await set_credit(books, 40 * cost_of(1) + 100 * TOKEN_COST + TOKEN_COST - 1)
    writers = [HoldWriter(books.sessions), HoldWriter(books.sessions)]
    for writer in writers:
        await writer.start()
    held = await asyncio.gather(*(writers[i % 2].admit(books.admit(output=1)) for i in range(40)))

    async def grow(index: int) -> Hold:
        """As far as it goes, by one or seven tokens a time."""
        hold, writer = held[index], writers[index % 2]
        for step in (7, 1):
            try:
                while True:
                    target = hold.authorized_output_tokens + step
                    hold = await writer.extend(hold.request_id, hold.epoch, target)
            except InsufficientCredit:
                continue
        return hold

    grown = await asyncio.gather(*(grow(index) for index in range(40)))
    assert sum(hold.authorized_output_tokens for hold in grown) == 140
    assert (await balance_of(books)).available == TOKEN_COST - 1
    await asyncio.gather(
        *(
            writers[index % 2].settle(settle_of(hold, output=hold.authorized_output_tokens))
            for index, hold in enumerate(grown)
        )
    )
    for writer in writers:
        await writer.stop()
    after = await balance_of(books)
    assert (after.posted, after.held) == (TOKEN_COST - 1, 0), "overdrawn by nothing"
    await assert_reconciled(books.sessions)


async def test_a_budget_bounds_extensions_of_one_group_together(
    books: Books, writer: HoldWriter
) -> None:
    held = [await writer.admit(books.admit(output=1)) for _ in range(8)]
    async with books.sessions.begin() as session:
        await budgets.set_budget(
            session,
            books.organization_id,
            api_key_id=books.customer.issued_key.key.id,
            limit_nano_usd=8 * cost_of(1) + 25 * TOKEN_COST,
            period="day",
        )
    extensions = [writer.extend(hold.request_id, hold.epoch, 11) for hold in held]
    results = await asyncio.gather(*extensions, return_exceptions=True)
    granted = [result for result in results if isinstance(result, Hold)]
    assert len(granted) == 2
    refusals = [result for result in results if isinstance(result, BudgetExceeded)]
    assert len(refusals) == 6
    assert {refusal.facts["available"] for refusal in refusals} == {5 * TOKEN_COST}
    await assert_reconciled(books.sessions)


async def test_a_lower_target_neither_frees_nor_shortens(books: Books, writer: HoldWriter) -> None:
    """A message of an extension that comes late."""
    hold = await writer.admit(books.admit())
    extended = await writer.extend(hold.request_id, hold.epoch, 30)
    assert await writer.extend(hold.request_id, hold.epoch, 20) == extended
    assert (await balance_of(books)).held == cost_of(30)
    with pytest.raises(HoldExceeded):
        await writer.settle(settle_of(extended, output=31))
    assert (await writer.settle(settle_of(extended, output=30))).charge_nano_usd == cost_of(30)


async def test_an_extension_that_comes_after_the_settlement_is_fenced(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    await writer.settle(settle_of(hold))
    with pytest.raises(HoldFenced):
        await writer.extend(hold.request_id, hold.epoch, 20)
    assert (await balance_of(books)).held == 0
    await assert_reconciled(books.sessions)


async def test_an_extension_beside_the_settlement_goes_first_and_leaves_nothing_held(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    settling = writer.settle(settle_of(hold))
    extending = writer.extend(hold.request_id, hold.epoch, 20)
    settlement, extended = await asyncio.gather(settling, extending)
    assert (settlement.charge_nano_usd, extended.authorized_output_tokens) == (cost_of(10), 20)
    assert (await balance_of(books)).held == 0
    await assert_reconciled(books.sessions)


async def test_slices_cost_what_the_whole_costs(books: Books, writer: HoldWriter) -> None:
    """One rounding on the cumulative total: no way of slicing changes what is held or charged."""
    hold = await writer.admit(books.admit(output=1))
    for target in (2, 3, 5, 8, 13, 21, 34):
        hold = await writer.extend(hold.request_id, hold.epoch, target)
    assert hold.amount_nano_usd == (await writer.admit(books.admit(output=34))).amount_nano_usd
    assert (await writer.settle(settle_of(hold, output=34))).charge_nano_usd == cost_of(34)
    async with read_only(books.sessions) as session:
        balance = await ledger.balance(session, books.organization_id)
    assert balance.held == cost_of(34), "the other one's"
