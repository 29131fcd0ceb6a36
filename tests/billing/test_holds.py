"""Holds on a nearly empty balance, through the writer, on both databases."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from accounts import api_keys
from accounts.errors import InvalidKey, KeyRevoked
from billing import ledger
from billing.errors import HoldExceeded, HoldFenced, InsufficientCredit
from billing.gateways import GatewayLease
from billing.hold_operations import Owner
from billing.holds import HoldWriter, SettleHold
from billing.models import UsageRecord
from billing.money import NANO_PER_DOLLAR
from billing.reconcile import reconcile
from billing.sweeps import close_lost_gateways
from common.db import Sessions, read_only
from tests.billing.conftest import Books, settle_of

COST = 100 * 2_000 + 10 * 6_000
"""Nano-dollars of the default request: 100 tokens in, 10 out."""


async def balance_of(books: Books) -> ledger.Balance:
    async with read_only(books.sessions) as session:
        return await ledger.balance(session, books.organization_id)


async def set_credit(books: Books, amount: int) -> None:
    async with books.sessions.begin() as session:
        change = amount - NANO_PER_DOLLAR
        await ledger.adjust_credit(
            session, books.organization_id, change, reason="test", actor="test", key="set"
        )


async def assert_books_balance(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []


async def test_a_hold_reserves_and_a_settlement_charges_what_was_used(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    assert hold.amount_nano_usd == COST
    assert (await balance_of(books)).held == COST
    settlement = await writer.settle(settle_of(hold, uncached=60, cached=40, output=3))
    assert settlement.charge_nano_usd == 60 * 2_000 + 40 * 500 + 3 * 6_000
    after = await balance_of(books)
    assert after.held == 0
    assert after.posted == NANO_PER_DOLLAR - settlement.charge_nano_usd
    assert after.available == settlement.available_nano_usd
    await assert_books_balance(books.sessions)


async def test_any_number_of_admissions_at_once_never_oversells(
    books: Books, writer: HoldWriter
) -> None:
    await set_credit(books, 7 * COST + COST // 3)
    admits = [writer.admit(books.admit(prompt=100, output=10)) for _ in range(60)]
    results = await asyncio.gather(*admits, return_exceptions=True)
    holds = [result for result in results if not isinstance(result, BaseException)]
    refused = [result for result in results if isinstance(result, InsufficientCredit)]
    assert len(holds) + len(refused) == 60
    assert len([hold for hold in holds if hold.authorized_output_tokens == 10]) == 7
    after = await balance_of(books)
    assert after.available >= 0
    assert after.held == sum(hold.amount_nano_usd for hold in holds)


async def test_two_processes_do_not_oversell_either(books: Books, sessions: Sessions) -> None:
    await set_credit(books, 5 * COST)
    writers = [HoldWriter(sessions), HoldWriter(sessions)]
    for one in writers:
        await one.start()
    admits = [writers[i % 2].admit(books.admit()) for i in range(20)]
    results = await asyncio.gather(*admits, return_exceptions=True)
    for one in writers:
        await one.stop()
    assert len([r for r in results if not isinstance(r, BaseException)]) == 5
    assert (await balance_of(books)).available == 0


async def test_less_output_is_authorized_where_not_all_of_it_fits(
    books: Books, writer: HoldWriter
) -> None:
    await set_credit(books, 100 * 2_000 + 4 * 6_000 + 5_999)
    assert (await writer.admit(books.admit(output=1000))).authorized_output_tokens == 4


async def test_not_even_one_token_is_refused_with_the_numbers(
    books: Books, writer: HoldWriter
) -> None:
    await set_credit(books, 100 * 2_000 + 5_999)
    with pytest.raises(InsufficientCredit) as refused:
        await writer.admit(books.admit())
    assert refused.value.facts["available"] == 100 * 2_000 + 5_999
    assert refused.value.facts["required"] == 100 * 2_000 + 6_000
    assert (await balance_of(books)).held == 0


@pytest.mark.parametrize("is_named", [True, False])
async def test_it_is_the_same_whether_an_operation_names_its_owner(
    books: Books, writer: HoldWriter, is_named: bool
) -> None:
    key_id = books.customer.issued_key.key.id
    owner = Owner(books.organization_id, key_id) if is_named else None
    first, second = [await writer.admit(books.admit()) for _ in range(2)]
    hold = await writer.extend(first.request_id, 1, 20, owner=owner)
    settling = writer.settle(replace(settle_of(hold, output=20), owner=owner))
    voiding = writer.void(second.request_id, 1, "aborted", owner=owner)
    settlement, voided = await asyncio.gather(settling, voiding)
    assert (settlement.charge_nano_usd, voided.charge_nano_usd) == (COST + 10 * 6_000, 0)
    assert (await balance_of(books)).available == NANO_PER_DOLLAR - COST - 10 * 6_000
    third = await writer.admit(books.admit())
    async with books.sessions.begin() as session:
        await api_keys.revoke(session, books.organization_id, key_id)
    with pytest.raises(KeyRevoked):
        await writer.extend(third.request_id, 1, 20, owner=owner)


async def test_settling_twice_charges_once(books: Books, writer: HoldWriter) -> None:
    hold = await writer.admit(books.admit())
    first = await writer.settle(settle_of(hold))
    second = await writer.settle(settle_of(hold))
    assert first == second
    assert (await balance_of(books)).posted == NANO_PER_DOLLAR - COST
    async with read_only(books.sessions) as session:
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1


async def test_usage_beyond_the_hold_is_refused_and_charges_nothing(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    # Cheap enough or not: neither more output than authorized nor more prompt than was held.
    for uncached, cached, output in ((100, 0, 11), (0, 100, 11), (101, 0, 0), (0, 101, 0)):
        with pytest.raises(HoldExceeded):
            await writer.settle(settle_of(hold, uncached, cached, output))
    assert (await balance_of(books)).posted == NANO_PER_DOLLAR
    assert (await writer.settle(settle_of(hold))).charge_nano_usd == COST


async def test_a_void_is_free_and_leaves_its_record(books: Books, writer: HoldWriter) -> None:
    hold = await writer.admit(books.admit())
    settlement = await writer.void(hold.request_id, hold.epoch, "platform_fault")
    assert settlement.charge_nano_usd == 0
    assert (await balance_of(books)).available == NANO_PER_DOLLAR
    async with read_only(books.sessions) as session:
        record = await session.get(UsageRecord, hold.request_id)
        assert record is not None
        assert (record.charge_nano_usd, record.outcome) == (0, "platform_fault")
    assert (await writer.settle(settle_of(hold))).charge_nano_usd == 0
    await assert_books_balance(books.sessions)


async def test_the_same_admission_again_is_the_same_hold(books: Books, writer: HoldWriter) -> None:
    admit = books.admit()
    assert await writer.admit(admit) == await writer.admit(admit)
    assert (await balance_of(books)).held == COST


async def test_an_extension_is_a_target_and_not_an_increment(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    for _ in range(3):
        extended = await writer.extend(hold.request_id, hold.epoch, 25)
        assert extended.authorized_output_tokens == 25
    assert extended.amount_nano_usd == 100 * 2_000 + 25 * 6_000
    assert (await balance_of(books)).held == extended.amount_nano_usd
    with pytest.raises(InsufficientCredit):
        await writer.extend(hold.request_id, hold.epoch, 10**9)
    assert (await balance_of(books)).held == extended.amount_nano_usd


async def test_a_revoked_key_admits_nothing_more(books: Books, writer: HoldWriter) -> None:
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)
    with pytest.raises(KeyRevoked):
        await writer.admit(books.admit())


async def test_nobody_spends_with_the_key_of_another(books: Books, writer: HoldWriter) -> None:
    other = await books.sign_up("eve@example.com")
    with pytest.raises(InvalidKey):
        await writer.admit(books.admit(api_key_id=other.issued_key.key.id))


async def test_the_sweeper_frees_what_a_dead_gateway_held_and_fences_it(
    books: Books, writer: HoldWriter
) -> None:
    await GatewayLease(books.sessions, "gw_alive").renew()
    dead = GatewayLease(books.sessions, "gw_dead")
    await dead.renew()
    alive_hold = await writer.admit(books.admit(gateway="gw_alive"))
    dead_hold = await writer.admit(books.admit(gateway="gw_dead"))
    async with books.sessions.begin() as session:
        assert await close_lost_gateways(session) == 0
    await dead.release()
    async with books.sessions.begin() as session:
        assert await close_lost_gateways(session) == 1
    assert (await balance_of(books)).held == alive_hold.amount_nano_usd
    with pytest.raises(HoldFenced):
        await writer.settle(settle_of(dead_hold))
    with pytest.raises(HoldFenced):
        await writer.extend(dead_hold.request_id, dead_hold.epoch, 20)
    assert (await writer.settle(settle_of(alive_hold))).charge_nano_usd == COST
    await assert_books_balance(books.sessions)


REWRITABLE_COLUMNS = {
    "prices": "model",
    "ledger_transactions": "memo",
    "ledger_entries": "account",
    "lot_uses": "lot_id",
    "usage_records": "outcome",
    "audit_events": "action",
}


async def test_the_database_refuses_to_rewrite_the_books(books: Books, writer: HoldWriter) -> None:
    await writer.settle(settle_of(await writer.admit(books.admit())))
    for table, column in REWRITABLE_COLUMNS.items():
        for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = 'x'"):
            async with books.sessions() as session:
                with pytest.raises(DBAPIError, match="append-only"):
                    await session.execute(text(statement))


async def test_whoever_has_lost_a_hold_can_do_nothing_with_it(
    books: Books, writer: HoldWriter
) -> None:
    """Another epoch is fenced while the hold is open, not only once it is closed."""
    hold = await writer.admit(books.admit())
    lost = hold.epoch + 1
    with pytest.raises(HoldFenced):
        await writer.extend(hold.request_id, lost, 20)
    with pytest.raises(HoldFenced):
        await writer.settle(SettleHold(hold.request_id, lost, 100, 0, 10, "completed"))
    with pytest.raises(HoldFenced):
        await writer.void(hold.request_id, lost, "aborted")
    assert (await writer.settle(settle_of(hold))).charge_nano_usd == COST
