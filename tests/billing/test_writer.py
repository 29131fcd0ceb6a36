"""The writer under bad luck: hung-up callers, poisoned groups, a database that comes and goes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from sqlalchemy import func, select

from accounts import api_keys
from accounts.errors import KeyRevoked, OrganizationFrozen
from accounts.models import Organization
from billing import holds, ledger
from billing.errors import HoldConflict, HoldNotFound, LedgerUnavailable, PriceNotFound
from billing.hold_operations import Hold, SettleHold, UsageFacts
from billing.holds import HoldWriter
from billing.models import HoldRecord, UsageRecord
from billing.money import NANO_PER_DOLLAR
from billing.reconcile import reconcile
from common.db import Sessions, create_engine, read_only
from tests.billing.conftest import Books, settle_of
from tests.billing.faults import Faults

COST = 100 * 2_000 + 10 * 6_000


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def faulty(
    database_url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sessions]:
    """Sessions on the same database whose commits suffer what is planned."""
    monkeypatch.setattr(holds, "FIRST_PAUSE_S", 0.01)
    engine = create_engine(database_url)
    yield faults.sessions(engine)
    await engine.dispose()


async def hold_states(books: Books) -> dict[str, int]:
    async with read_only(books.sessions) as session:
        found = await session.execute(
            select(HoldRecord.state, func.count()).group_by(HoldRecord.state)
        )
        return {row[0]: row[1] for row in found}


async def assert_reconciled(books: Books) -> None:
    async with read_only(books.sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []


async def test_an_admission_whose_caller_hung_up_is_voided(
    books: Books, writer: HoldWriter
) -> None:
    callers = [asyncio.create_task(writer.admit(books.admit())) for _ in range(8)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await writer.stop()
    assert (await hold_states(books)).get("open", 0) == 0
    await assert_reconciled(books)


async def test_an_admission_whose_caller_left_with_the_answer_is_voided(
    books: Books, writer: HoldWriter
) -> None:
    """The answer is there, and the caller is cancelled before it has looked at it."""
    caller = asyncio.create_task(writer.admit(books.admit()))
    await asyncio.sleep(0)
    (waiting,) = writer._waiting
    while not waiting.future.done():
        # Its caller is woken by what is behind this in the turn.
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert caller.cancelled()
    await writer.stop()
    assert await hold_states(books) == {"voided": 1}
    await assert_reconciled(books)


async def test_a_settlement_goes_on_when_its_caller_is_cancelled(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    caller = asyncio.create_task(writer.settle(settle_of(hold)))
    await asyncio.sleep(0)
    caller.cancel()
    await writer.stop()
    assert await hold_states(books) == {"settled": 1}


async def test_one_bad_request_does_not_take_its_group_down(
    books: Books, writer: HoldWriter
) -> None:
    admits = [books.admit() for _ in range(12)]
    # The database itself refuses this one, and with it the whole transaction.
    admits[5] = books.admit(gateway=None)
    results = await asyncio.gather(*map(writer.admit, admits), return_exceptions=True)
    failed = [index for index, result in enumerate(results) if isinstance(result, BaseException)]
    assert failed == [5]
    assert await hold_states(books) == {"open": 11}


async def test_requests_that_arrive_together_share_their_commits(
    books: Books, faulty: Sessions, faults: Faults
) -> None:
    faults.planned.extend([None] * 100)
    writer = HoldWriter(faulty)
    await writer.start()
    await asyncio.gather(*(writer.admit(books.admit(output=1)) for _ in range(100)))
    await writer.stop()
    assert 100 - len(faults.planned) <= 3
    assert await hold_states(books) == {"open": 100}


def ended_stream(hold: Hold) -> SettleHold:
    return replace(settle_of(hold), facts=UsageFacts(streamed=True))


async def test_streams_that_end_one_after_the_other_share_their_commits(
    books: Books, faulty: Sessions, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "GATHER_S", 0.2)
    writer = HoldWriter(faulty)
    await writer.start()
    opened = [await writer.admit(books.admit(output=10)) for _ in range(12)]
    faults.planned.extend([None] * 100)
    ending = []
    for hold in opened:
        ending.append(asyncio.create_task(writer.settle(ended_stream(hold))))
        await asyncio.sleep(0.005)
    await asyncio.gather(*ending)
    assert 100 - len(faults.planned) <= 4
    await writer.stop()
    assert await hold_states(books) == {"settled": 12}
    await assert_reconciled(books)


async def test_nobody_else_waits_for_what_gathers(
    books: Books, writer: HoldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "GATHER_S", 60.0)
    first, second, whole = [await writer.admit(books.admit()) for _ in range(3)]
    async with asyncio.timeout(5):
        await writer.settle(ended_stream(first))  # alone
        gathering = asyncio.create_task(writer.settle(ended_stream(second)))
        await asyncio.sleep(0.01)
        await writer.admit(books.admit())
        await writer.settle(settle_of(whole))
        assert not gathering.done()
        await writer.stop()
    assert (await gathering).charge_nano_usd == COST


async def test_a_crowd_is_gone_through_in_parts_and_nobody_is_left_out(
    books: Books, writer: HoldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "LOOK_LIMIT", 3)
    arrived = [writer.begin(books.admit(output=1)) for _ in range(10)]
    ended: list[int] = []
    for position, admitting in enumerate(arrived):
        admitting.add_done_callback(lambda _, position=position: ended.append(position))
    assert len(writer._next_group()) == 3
    assert len(writer._waiting) == 7
    await asyncio.gather(*arrived[3:])
    assert ended == list(range(3, 10)), "in the order in which they came"
    for admitting in arrived[:3]:
        writer.abandon(admitting)


async def test_a_writer_that_rests_needs_no_connection(books: Books, sessions: Sessions) -> None:
    writer = HoldWriter(sessions, rest_after_s=0.02)
    await writer.start()
    pool = sessions.kw["bind"].pool
    for _ in range(2):
        await writer.admit(books.admit())
        assert pool.checkedout() == 1
        await asyncio.sleep(0.1)
        assert pool.checkedout() == 0
    await writer.stop()


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_settlement_that_got_no_answer_is_charged_once(
    books: Books, faulty: Sessions, faults: Faults, fault: str
) -> None:
    writer = HoldWriter(faulty)
    await writer.start()
    hold = await writer.admit(books.admit())
    faults.planned.extend([fault] * 4)  # type: ignore[list-item]
    settlement = await writer.settle(settle_of(hold))
    await writer.stop()
    assert settlement.charge_nano_usd == COST
    async with read_only(books.sessions) as session:
        assert (
            await ledger.balance(session, books.organization_id)
        ).posted == NANO_PER_DOLLAR - COST
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1
    await assert_reconciled(books)


async def test_a_caller_waits_only_so_long_but_the_settlement_is_not_dropped(
    books: Books, faulty: Sessions, faults: Faults
) -> None:
    writer = HoldWriter(faulty, settle_patience_s=0.0)
    await writer.start()
    hold = await writer.admit(books.admit())
    faults.planned.extend(["before"] * 3)
    with pytest.raises(LedgerUnavailable):
        await writer.settle(settle_of(hold))
    await writer.stop()
    assert await hold_states(books) == {"settled": 1}


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_an_admission_without_an_answer_leaves_nothing_held(
    books: Books, faulty: Sessions, faults: Faults, fault: str
) -> None:
    writer = HoldWriter(faulty)
    await writer.start()
    faults.planned.append(fault)  # type: ignore[arg-type]
    with pytest.raises(LedgerUnavailable):
        await writer.admit(books.admit())
    await writer.stop()
    assert (await hold_states(books)).get("open", 0) == 0
    await assert_reconciled(books)


async def test_a_stopped_writer_answers_everybody(books: Books, sessions: Sessions) -> None:
    writer = HoldWriter(sessions)
    with pytest.raises(LedgerUnavailable):
        await writer.admit(books.admit())
    await writer.start()
    waiting = [asyncio.create_task(writer.admit(books.admit(output=1))) for _ in range(30)]
    await asyncio.sleep(0)
    await writer.stop()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert all(isinstance(result, holds.Hold) for result in results)
    with pytest.raises(LedgerUnavailable):
        await writer.admit(books.admit())


async def test_a_frozen_organization_and_a_revoked_key_get_no_further(
    books: Books, writer: HoldWriter
) -> None:
    hold = await writer.admit(books.admit())
    async with books.sessions.begin() as session:
        organization = await session.get_one(Organization, books.organization_id)
        organization.status = "frozen"
    with pytest.raises(OrganizationFrozen):
        await writer.admit(books.admit())
    with pytest.raises(OrganizationFrozen):
        await writer.extend(hold.request_id, hold.epoch, 11)
    async with books.sessions.begin() as session:
        organization = await session.get_one(Organization, books.organization_id)
        organization.status = "active"
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)
    with pytest.raises(KeyRevoked):
        await writer.extend(hold.request_id, hold.epoch, 11)
    # What was used before is still paid for.
    assert (await writer.settle(settle_of(hold))).charge_nano_usd == COST


async def test_a_request_id_names_one_request(books: Books, writer: HoldWriter) -> None:
    first = books.admit()
    await writer.admit(first)
    with pytest.raises(HoldConflict):
        await writer.admit(books.admit(request_id=first.request_id, prompt=101))
    with pytest.raises(HoldNotFound):
        await writer.extend("req_unknown", 1, 5)
    with pytest.raises(PriceNotFound):
        await writer.admit(books.admit(price_id="price_unknown"))


async def test_choices_are_authorized_alike(books: Books, writer: HoldWriter) -> None:
    async with books.sessions.begin() as session:
        await ledger.adjust_credit(
            session,
            books.organization_id,
            100 * 2_000 + 8 * 6_000 - NANO_PER_DOLLAR,
            reason="test",
            actor="test",
            key="set",
        )
    hold = await writer.admit(books.admit(output=30, num_choices=3))
    assert hold.authorized_output_tokens == 6


async def test_adjustments_meanwhile_break_nothing(
    books: Books, writer: HoldWriter, sessions: Sessions
) -> None:
    other = HoldWriter(sessions)
    await other.start()

    async def spend(one: HoldWriter) -> None:
        for _ in range(10):
            hold = await one.admit(books.admit())
            await one.settle(settle_of(hold, uncached=40, cached=60, output=7))

    async def adjust(sign: int) -> None:
        for index in range(10):
            async with sessions.begin() as session:
                await ledger.adjust_credit(
                    session,
                    books.organization_id,
                    sign * 1_000_003,
                    reason="test",
                    actor="test",
                    key=f"{sign}:{index}",
                )

    await asyncio.gather(spend(writer), spend(other), spend(writer), adjust(1), adjust(-1))
    await other.stop()
    await assert_reconciled(books)
    async with read_only(sessions) as session:
        balance = await ledger.balance(session, books.organization_id)
    assert balance.posted == NANO_PER_DOLLAR - 30 * (40 * 2_000 + 60 * 500 + 7 * 6_000)
