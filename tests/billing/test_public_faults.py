"""Faults that others' customers have met in public, each tried here by its own name.

`money_faults.py` is the whole table, and says where the others have their tests.
"""

import asyncio

import pytest

from billing import budgets, pricing
from billing.errors import BudgetExceeded, InvalidAmount
from billing.hold_operations import SettleHold
from billing.holds import HoldWriter
from billing.models import UsageRecord
from billing.usage import find
from common.db import read_only
from common.ids import new_id
from tests.billing.conftest import CACHED, INPUT, OUTPUT, Books, settle_of

COST = 100 * 2_000 + 10 * 6_000


async def record_of(books: Books, request_id: str) -> UsageRecord:
    async with read_only(books.sessions) as session:
        record = await find(session, books.organization_id, request_id)
    assert record is not None
    return record


async def test_budget_counted_twice_under_load(books: Books, writer: HoldWriter) -> None:
    """litellm 36926: a key was refused at 74 % of its budget."""
    await bound(books, 20 * COST)
    for _ in range(4):
        holds = await asyncio.gather(*(writer.admit(books.admit()) for _ in range(5)))
        await asyncio.gather(*(writer.settle(settle_of(hold)) for hold in holds))
    with pytest.raises(BudgetExceeded) as refused:
        await writer.admit(books.admit())
    assert refused.value.facts["available"] == 0


async def test_budget_kept_per_replica(books: Books) -> None:
    """litellm 39390: two replicas spent nearly twice the cap."""
    await bound(books, 7 * COST)
    writers = [HoldWriter(books.sessions) for _ in range(3)]
    for one in writers:
        await one.start()
    results = await asyncio.gather(
        *(one.admit(books.admit()) for one in writers for _ in range(10)), return_exceptions=True
    )
    for one in writers:
        await one.stop()
    whole = [r for r in results if not isinstance(r, Exception)]
    assert {type(r) for r in results if isinstance(r, Exception)} == {BudgetExceeded}
    assert sum(hold.amount_nano_usd for hold in whole) <= 7 * COST
    assert sum(hold.amount_nano_usd for hold in whole) > 6 * COST


async def test_a_model_with_a_price_of_its_own_logged_as_free(
    books: Books, writer: HoldWriter
) -> None:
    """litellm 21023: some requests of a custom-priced model cost $0, so that no budget tripped."""
    async with books.sessions.begin() as session:
        other = await pricing.set_price(session, "owner/other", input=3, cached=2, output=1)
    cheap = await writer.admit(books.admit(model="owner/other", price_id=other.id))
    usual = await writer.admit(books.admit())
    assert (await writer.settle(settle_of(cheap))).charge_nano_usd == 1  # a use is never free
    assert (await writer.settle(settle_of(usual))).charge_nano_usd == COST
    record = await record_of(books, cheap.request_id)
    assert (record.model, record.price_id) == ("owner/other", other.id)


@pytest.mark.parametrize("counts", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (100, -100, 10)])
async def test_negative_usage_refills_the_quota(
    books: Books, writer: HoldWriter, counts: tuple[int, int, int]
) -> None:
    """octopus 243; GHSA-8r8v-xf7q-rcpr of new-api: a negative cost is credit."""
    hold = await writer.admit(books.admit())
    with pytest.raises(InvalidAmount):
        await writer.settle(SettleHold(hold.request_id, 1, *counts, "completed"))
    assert (await writer.settle(settle_of(hold))).charge_nano_usd == COST


@pytest.mark.parametrize("tokens", [-1, 2**53 + 1, 2**63 - 1, 2**63, 2**64])
async def test_overflowing_counts_mint_money(books: Books, writer: HoldWriter, tokens: int) -> None:
    """new-api: `n` beyond 64 bits made the cost negative, which credited the user."""
    for changes in ({"input_tokens": tokens}, {"output_tokens": tokens}):
        with pytest.raises(InvalidAmount):
            await writer.admit(books.admit(**changes))


async def test_explicit_zero_read_as_missing(books: Books, writer: HoldWriter) -> None:
    """litellm 37992: `usage or estimate` charged an estimate where nothing had been used."""
    hold = await writer.admit(books.admit())
    settlement = await writer.settle(settle_of(hold, uncached=0, cached=0, output=0))
    assert settlement.charge_nano_usd == 0
    record = await record_of(books, hold.request_id)
    assert (record.input_tokens, record.output_tokens, record.is_billable) == (0, 0, True)


@pytest.mark.parametrize("accepted", range(11))
async def test_hang_up_at_every_token(books: Books, writer: HoldWriter, accepted: int) -> None:
    """litellm 33736, new-api 5235: whoever hung up before the usage came paid nothing, or all."""
    hold = await writer.admit(books.admit())
    abort = SettleHold(hold.request_id, 1, 80, 20, accepted, "aborted")
    charge = (80 * INPUT + 20 * CACHED + accepted * OUTPUT) // 10**6
    assert (await writer.settle(abort)).charge_nano_usd == charge
    assert (await writer.settle(abort)).charge_nano_usd == charge
    assert (await record_of(books, hold.request_id)).output_tokens == accepted


async def test_an_id_of_the_engines_used_again_drops_a_row(
    books: Books, writer: HoldWriter
) -> None:
    """litellm 6633, 28376: rows under a provider's id that was empty or came twice were lost."""
    holds = [await writer.admit(books.admit(request_id=new_id("req"))) for _ in range(5)]
    for hold in holds:
        await writer.settle(settle_of(hold))
    assert len({hold.request_id for hold in holds}) == 5
    for hold in holds:
        assert (await record_of(books, hold.request_id)).charge_nano_usd == COST


async def test_the_same_use_recorded_by_two_messages(books: Books, writer: HoldWriter) -> None:
    """litellm 15740, 17814; Vexa 330: a second message of the same request made a second row."""
    hold = await writer.admit(books.admit())
    first = await writer.settle(settle_of(hold, output=7))
    for again in (settle_of(hold, output=9), settle_of(hold, uncached=50)):
        assert (await writer.settle(again)).charge_nano_usd == first.charge_nano_usd
    assert (await writer.void(hold.request_id, 1, "platform_fault")).charge_nano_usd == (
        first.charge_nano_usd
    )
    assert (await record_of(books, hold.request_id)).output_tokens == 7


async def bound(books: Books, limit: int) -> None:
    async with books.sessions.begin() as session:
        await budgets.set_budget(
            session,
            books.organization_id,
            api_key_id=books.customer.issued_key.key.id,
            limit_nano_usd=limit,
            period="month",
        )
