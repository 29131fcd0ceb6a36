"""Automatic recharge: at most one charge at a time, so much a month, and never by surprise."""

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from billing import ledger, payment_mail, recharge, webhooks
from billing.errors import InvalidAmount, PaymentRefused
from billing.payment_models import PaymentProfile, Topup
from billing.payment_profiles import find_profile, set_recharge
from common.db import read_only
from common.outbox import OutboxMessage
from tests.billing.fake_stripe.state import DECLINED, NEEDS_OWNER
from tests.billing.payments import (
    DOLLAR,
    Desk,
    database_url,
    desk,
    fake,
    on_both_databases,
    running_stripe,
)

__all__ = ["database_url", "desk", "fake", "running_stripe"]

MIDDLE_OF_A_MONTH = int(datetime(2026, 7, 10, 12, tzinfo=UTC).timestamp()) * 1_000_000


async def switch_on(desk: Desk, *, cents: int = 1_000, cap: int = 5_000) -> None:
    """A saved card, and $8 of credit below a threshold of $10."""
    desk.now_us = MIDDLE_OF_A_MONTH
    await desk.paid(is_card_saved=True)
    async with desk.sessions.begin() as session:
        await set_recharge(
            session,
            desk.organization_id,
            is_on=True,
            threshold_cents=1_000,
            amount_cents=cents,
            month_cap_cents=cap,
        )
        await ledger.adjust_credit(
            session, desk.organization_id, -42 * DOLLAR, reason="spent", actor="t", key="spent"
        )


async def run(desk: Desk) -> int:
    return await recharge.run_due(desk.sessions, desk.payments, clock=desk.clock)


async def recharges(desk: Desk) -> list[Topup]:
    async with read_only(desk.sessions) as session:
        found = await session.scalars(
            select(Topup).where(Topup.kind == "recharge").order_by(Topup.created_at)
        )
        return list(found)


async def profile_of(desk: Desk) -> PaymentProfile:
    async with read_only(desk.sessions) as session:
        profile = await find_profile(session, desk.organization_id)
    assert profile is not None
    return profile


def charge_with(desk: Desk, card: str) -> None:
    """From now on the saved card behaves like this one."""
    desk.fake.state.cards = dict.fromkeys(desk.fake.state.cards, card)


@on_both_databases
async def test_many_crossings_at_once_charge_once(desk: Desk) -> None:
    """claude-code 68773: 29 charges, six of them within ten minutes."""
    await switch_on(desk)
    await asyncio.gather(*(run(desk) for _ in range(6)))
    await desk.pump.pump()
    await desk.sweep()
    assert [topup.state for topup in await recharges(desk)] == ["paid"]
    assert (await desk.balance()).posted == 18 * DOLLAR
    assert len(desk.fake.state.all("payment_intent")) == 2
    assert await desk.failed_checks() == []


async def test_it_is_off_until_its_owner_switches_it_on_and_needs_a_card(desk: Desk) -> None:
    async with desk.sessions.begin() as session:
        with pytest.raises(PaymentRefused):
            await set_recharge(
                session,
                desk.organization_id,
                is_on=True,
                threshold_cents=100,
                amount_cents=500,
                month_cap_cents=500,
            )
        for wrong in ((100, 499, 500), (-1, 500, 500), (100, 500, 499), (100, 500_001, 10**8)):
            with pytest.raises(InvalidAmount):
                await set_recharge(
                    session,
                    desk.organization_id,
                    is_on=False,
                    threshold_cents=wrong[0],
                    amount_cents=wrong[1],
                    month_cap_cents=wrong[2],
                )
    await desk.paid(500, is_card_saved=True)
    assert await run(desk) == 0


async def test_there_is_a_minute_between_two_and_a_limit_a_month(desk: Desk) -> None:
    await switch_on(desk, cents=500, cap=1_200)
    async with desk.sessions.begin() as session:
        await ledger.adjust_credit(
            session, desk.organization_id, -90 * DOLLAR, reason="debt", actor="t", key="debt"
        )
    assert [await run(desk), await run(desk)] == [1, 0]
    desk.pass_time(61)
    assert await run(desk) == 1
    desk.pass_time(86_400)
    assert await run(desk) == 0, "a third would pass the limit of the month"
    desk.pass_time(31 * 86_400)
    assert await run(desk) == 1
    assert [topup.amount_cents for topup in await recharges(desk)] == [500, 500, 500]
    assert await desk.failed_checks() == []


async def test_three_declines_in_a_row_switch_it_off_and_tell_the_owner(desk: Desk) -> None:
    await switch_on(desk)
    charge_with(desk, DECLINED)
    for _ in range(5):
        await run(desk)
        desk.pass_time(120)
    assert [topup.failure for topup in await recharges(desk)] == ["card_declined"] * 3
    profile = await profile_of(desk)
    assert (profile.is_recharge_on, profile.paused_because) == (False, "card_declined")
    async with read_only(desk.sessions) as session:
        mails = await session.scalars(
            select(OutboxMessage.key).where(OutboxMessage.topic == payment_mail.TOPIC)
        )
        assert len([key for key in mails if key.startswith("recharge_failed:")]) == 3
    assert (await desk.balance()).posted == 8 * DOLLAR


async def test_a_success_in_between_starts_the_count_again(desk: Desk) -> None:
    await switch_on(desk, cents=500)
    async with desk.sessions.begin() as session:
        await ledger.adjust_credit(
            session, desk.organization_id, -90 * DOLLAR, reason="debt", actor="t", key="debt"
        )
    for card in (DECLINED, DECLINED, "4242424242424242", DECLINED, DECLINED):
        charge_with(desk, card)
        await run(desk)
        desk.pass_time(120)
    assert (await profile_of(desk)).is_recharge_on


async def test_a_bank_that_wants_the_owner_switches_it_off_at_once(desk: Desk) -> None:
    await switch_on(desk)
    charge_with(desk, NEEDS_OWNER)
    await run(desk)
    await desk.pump.pump()
    await desk.sweep()
    (topup,) = await recharges(desk)
    assert (topup.state, topup.failure) == ("failed", "authentication_required")
    profile = await profile_of(desk)
    assert (profile.is_recharge_on, profile.paused_because) == (False, "authentication_required")
    assert desk.fake.state.all("payment_intent")[-1]["status"] == "canceled"
    assert await run(desk) == 0


@pytest.mark.parametrize("fault", ["lost", "down"])
async def test_a_charge_whose_answer_was_lost_is_repeated_and_not_doubled(
    desk: Desk, fault: str
) -> None:
    await switch_on(desk)
    desk.fake.faults.append(fault)
    await run(desk)
    assert [topup.state for topup in await recharges(desk)] == ["pending"]
    assert await run(desk) == 0, "no second attempt beside the open one"
    desk.pass_time(31)
    await run(desk)
    assert [topup.state for topup in await recharges(desk)] == ["paid"]
    assert len(desk.fake.state.all("payment_intent")) == 2
    assert (await desk.balance()).posted == 18 * DOLLAR
    assert await desk.failed_checks() == []


async def test_an_error_that_stripe_repeats_ends_in_a_review_not_in_a_second_charge(
    desk: Desk,
) -> None:
    await switch_on(desk)
    desk.fake.faults.append("500")
    await run(desk)
    for wait_s in (400, 3_600, 86_400):
        desk.pass_time(wait_s)
        await run(desk)
    assert [topup.state for topup in await recharges(desk)] == ["review"]
    desk.pass_time(600)
    assert await run(desk) == 0
    assert len(desk.fake.state.all("payment_intent")) == 1


async def test_a_charge_that_was_made_after_all_is_found_by_its_name(desk: Desk) -> None:
    await switch_on(desk)
    desk.fake.faults.append("lost")
    await run(desk)
    desk.pass_time(86_400)  # the key is forgotten by now
    before = desk.fake.state.calls.count("POST /v1/payment_intents")
    await run(desk)
    assert desk.fake.state.calls.count("POST /v1/payment_intents") == before
    assert [topup.state for topup in await recharges(desk)] == ["paid"]
    assert await desk.failed_checks() == []


async def test_a_worker_that_dies_between_row_and_call_leaves_it_to_the_next(desk: Desk) -> None:
    await switch_on(desk)
    async with desk.sessions.begin() as session:
        assert await recharge.begin(session, desk.organization_id, clock=desk.clock)
    async with desk.sessions.begin() as session:
        assert await recharge.begin(session, desk.organization_id, clock=desk.clock) is None
    desk.pass_time(60)
    await run(desk)
    assert [topup.state for topup in await recharges(desk)] == ["paid"]


@pytest.mark.parametrize("gone", ["card", "customer"])
async def test_what_was_removed_at_stripe_is_not_charged(desk: Desk, gone: str) -> None:
    await switch_on(desk)
    profile = await profile_of(desk)
    assert profile.payment_method_id is not None
    assert profile.customer_id is not None
    if gone == "card":
        desk.fake.state.detach(profile.payment_method_id)
    else:
        desk.fake.state.tell("customer.deleted", desk.fake.state.objects[profile.customer_id])
    await desk.pump.pump(is_adversarial=False)
    await webhooks.process_due(desk.sessions, desk.payments, clock=desk.clock)
    profile = await profile_of(desk)
    assert (profile.is_recharge_on, profile.card_label) == (False, None)
    assert profile.paused_because == "card_removed"
    assert await run(desk) == 0


@on_both_databases
async def test_an_answer_that_waits_for_credit_is_charged_for_whatever_the_threshold(
    desk: Desk,
) -> None:
    """A paused answer has taken what was left: dust remains, which a threshold of $0 is below."""
    await switch_on(desk)
    async with desk.sessions.begin() as session:
        profile = await find_profile(session, desk.organization_id, is_locked=True)
        assert profile is not None
        profile.recharge_threshold_nano_usd = 0
    assert await run(desk) == 0, "$8 are left"
    async with desk.sessions.begin() as session:
        dust = 7 - (await ledger.balance(session, desk.organization_id)).posted
        await ledger.adjust_credit(
            session, desk.organization_id, dust, reason="spent", actor="t", key="dust"
        )
    assert await run(desk) == 1
    await desk.pump.pump()
    await desk.sweep()
    assert (await desk.balance()).posted == 10 * DOLLAR + 7
    assert await desk.failed_checks() == []
