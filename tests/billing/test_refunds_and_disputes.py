"""Money that goes back: refunds and disputes, in every order, each once."""

import asyncio
from typing import cast

import pytest

from accounts.errors import OrganizationFrozen
from accounts.models import Organization
from billing import disputes, refunds, webhooks
from billing.errors import PaymentsUnavailable, RefundTooLarge, TopupNotFound
from billing.holds import HoldWriter
from billing.payment_models import Refund, Topup
from billing.payment_profiles import find_profile, set_recharge
from billing.stripe_client import Payments, RefundFacts
from common.db import read_only
from tests.billing.conftest import Books
from tests.billing.fake_stripe.pump import signed
from tests.billing.fake_stripe.state import GOOD
from tests.billing.payments import (
    CENT,
    DOLLAR,
    Desk,
    database_url,
    desk,
    fake,
    on_both_databases,
    running_stripe,
)

__all__ = ["database_url", "desk", "fake", "running_stripe"]


async def ask(desk: Desk, topup: Topup, cents: int) -> Refund:
    async with desk.sessions.begin() as session:
        return await refunds.request(
            session, topup.id, amount_cents=cents, reason="asked", actor="test", clock=desk.clock
        )


def intent_of(topup: Topup) -> str:
    assert topup.payment_intent_id is not None
    return topup.payment_intent_id


async def state_of(desk: Desk, refund_id: str) -> str:
    async with read_only(desk.sessions) as session:
        return (await session.get_one(Refund, refund_id)).state


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
async def test_two_partial_refunds_in_any_order_each_count_once(
    desk: Desk, order: tuple[int, ...]
) -> None:
    """replyinmyvoice 301: the cumulative amount_refunded was subtracted again and again."""
    topup = await desk.paid()
    before = len(desk.fake.state.events)
    for cents in (1_000, 1_500):
        desk.fake.state.refund(intent_of(topup), cents)
    events = desk.fake.state.events[before:]
    for position in order:
        for copy in range(2):
            await desk.receive(*signed(events[position] | {"id": f"evt_{position}_{copy}"}))
        await desk.process()
    assert (await desk.balance()).posted == 25 * DOLLAR
    assert await desk.failed_checks() == []


@on_both_databases
async def test_a_refund_takes_the_credit_before_stripe_is_asked(desk: Desk) -> None:
    topup = await desk.paid()
    refund = await ask(desk, topup, 2_000)
    assert (await desk.balance()).posted == 30 * DOLLAR
    await asyncio.gather(*(refunds.send(desk.sessions, desk.payments, refund.id) for _ in range(3)))
    await desk.pump.pump(is_adversarial=False)
    await desk.process()
    assert len(desk.fake.state.all("refund")) == 1
    assert await state_of(desk, refund.id) == "taken"
    assert (await desk.balance()).posted == 30 * DOLLAR
    assert await desk.failed_checks() == []


async def test_a_refund_is_no_more_than_what_is_left(desk: Desk) -> None:
    topup = await desk.paid()
    await desk.paid()  # there is credit for more, but not of this payment
    await ask(desk, topup, 4_000)
    for cents in (1_001, 0, -1, 10**9):
        with pytest.raises(RefundTooLarge):
            await ask(desk, topup, cents)
    await desk.hold(55 * DOLLAR)
    with pytest.raises(RefundTooLarge):
        await ask(desk, topup, 501)
    await ask(desk, topup, 500)
    unpaid = await desk.open_checkout()
    for topup_id in (unpaid, Topup(id="top_none")):
        with pytest.raises(TopupNotFound):
            await ask(desk, topup_id, 1)


async def test_a_refund_takes_bought_credit_and_leaves_the_gift(desk: Desk, books: Books) -> None:
    await books.sign_up("other@example.com", credit=DOLLAR)
    topup = await desk.paid()
    async with desk.sessions.begin() as session:
        from billing import chart, ledger
        from billing.ledger import Posting

        await ledger.post(
            session,
            key="gift",
            kind="test",
            organization_id=desk.organization_id,
            postings=[
                Posting(chart.customer(desk.organization_id), 7 * DOLLAR),
                Posting(chart.PROMOTIONAL_EXPENSE, -7 * DOLLAR),
            ],
            actor="t",
            memo="t",
            lot_kind="promotional",
        )
    await ask(desk, topup, 5_000)
    balance = await desk.balance()
    assert (balance.promotional, balance.paid) == (7 * DOLLAR, 0)


async def test_a_refund_that_fails_gives_the_credit_back(desk: Desk) -> None:
    topup = await desk.paid()
    refund = await ask(desk, topup, 2_000)
    await refunds.send(desk.sessions, desk.payments, refund.id)
    desk.fake.state.fail_refund(desk.fake.state.all("refund")[0])
    for _ in range(2):
        await desk.pump.pump()
        await desk.sweep()
    assert await state_of(desk, refund.id) == "failed"
    balance = await desk.balance()
    assert (balance.posted, balance.paid) == (50 * DOLLAR, 50 * DOLLAR)
    await ask(desk, topup, 5_000)
    assert (await desk.balance()).posted == 0


async def test_a_refund_whose_answer_was_lost_is_repeated_and_not_doubled(desk: Desk) -> None:
    topup = await desk.paid()
    refund = await ask(desk, topup, 2_000)
    desk.fake.faults.extend(["lost", "down"])
    for _ in range(2):
        with pytest.raises(PaymentsUnavailable):
            await refunds.send(desk.sessions, desk.payments, refund.id)
    desk.pass_time(600)
    await desk.sweep()
    assert len(desk.fake.state.all("refund")) == 1
    assert await state_of(desk, refund.id) == "taken"
    assert await desk.failed_checks() == []


async def test_a_refund_that_stripe_refuses_gives_the_credit_back(desk: Desk) -> None:
    topup = await desk.paid()
    refund = await ask(desk, topup, 3_000)
    desk.fake.state.refund(intent_of(topup), 3_000)  # the dashboard was quicker
    await refunds.send(desk.sessions, desk.payments, refund.id)
    await desk.sweep()
    assert await state_of(desk, refund.id) == "failed"
    assert (await desk.balance()).posted == 20 * DOLLAR
    assert await desk.failed_checks() == []


async def test_metadata_from_the_dashboard_cannot_claim_another_refund(desk: Desk) -> None:
    first, second = await desk.paid(), await desk.paid()
    ours = await ask(desk, first, 1_000)
    forged = desk.fake.state.refund(intent_of(second), 2_000, {"refund_id": ours.id})
    for _ in range(2):
        await refunds.converge(desk.sessions, desk.payments, forged["id"])
    assert await state_of(desk, ours.id) == "requested"
    assert await state_of(desk, forged["id"]) == "taken"
    assert (await desk.balance()).posted == 70 * DOLLAR


async def test_a_spent_payment_that_is_refunded_leaves_a_debt_to_be_paid_first(desk: Desk) -> None:
    topup = await desk.paid()
    async with desk.sessions.begin() as session:
        from billing import ledger

        await ledger.adjust_credit(
            session, desk.organization_id, -45 * DOLLAR, reason="spent", actor="t", key="k"
        )
    desk.fake.state.refund(intent_of(topup), 5_000)
    await desk.sweep()
    assert (await desk.balance()).posted == -45 * DOLLAR
    await desk.paid(6_000)
    assert (await desk.balance()).posted == 15 * DOLLAR
    assert await desk.failed_checks() == []


async def status(desk: Desk) -> str:
    async with read_only(desk.sessions) as session:
        return (await session.get_one(Organization, desk.organization_id)).status


@on_both_databases
async def test_a_dispute_takes_the_credit_and_the_right_to_spend_until_it_is_won(
    desk: Desk, books: Books, writer: HoldWriter
) -> None:
    topup = await desk.paid(is_card_saved=True)
    async with desk.sessions.begin() as session:
        await set_recharge(
            session,
            desk.organization_id,
            is_on=True,
            threshold_cents=100,
            amount_cents=500,
            month_cap_cents=500,
        )
    dispute = desk.fake.state.open_dispute(intent_of(topup))
    for _ in range(2):
        await desk.pump.pump()
        await desk.sweep()
    assert (await desk.balance()).posted == 0
    assert await status(desk) == "frozen"
    async with read_only(desk.sessions) as session:
        profile = await find_profile(session, desk.organization_id)
        assert profile is not None
        assert (profile.is_recharge_on, profile.paused_because) == (False, "disputed")
    with pytest.raises(RefundTooLarge):
        await ask(desk, topup, 100)
    with pytest.raises(OrganizationFrozen):
        await writer.admit(books.admit(organization_id=desk.organization_id, api_key_id=None))
    desk.fake.state.close_dispute(dispute, "won")
    await desk.pump.pump()
    await desk.sweep()
    assert (await desk.balance()).posted == 50 * DOLLAR
    assert await status(desk) == "active"
    assert await desk.failed_checks() == []


async def test_a_lost_dispute_goes_on_freezing(desk: Desk) -> None:
    topup = await desk.paid()
    dispute = desk.fake.state.open_dispute(intent_of(topup))
    desk.fake.state.close_dispute(dispute, "lost")
    await desk.sweep()
    assert ((await desk.balance()).posted, await status(desk)) == (0, "frozen")
    assert await desk.failed_checks() == []


async def test_an_inquiry_takes_nothing(desk: Desk) -> None:
    topup = await desk.paid()
    inquiry = desk.fake.state.open_dispute(intent_of(topup), is_inquiry=True)
    await desk.sweep()
    assert ((await desk.balance()).posted, await status(desk)) == (50 * DOLLAR, "active")
    desk.fake.state.close_dispute(inquiry, "warning_closed")
    await desk.sweep()
    assert ((await desk.balance()).posted, await status(desk)) == (50 * DOLLAR, "active")


async def test_of_two_disputes_the_last_one_won_releases(desk: Desk) -> None:
    first, second = await desk.paid(), await desk.paid()
    opened = [desk.fake.state.open_dispute(intent_of(topup)) for topup in (first, second)]
    await desk.sweep()
    desk.fake.state.close_dispute(opened[0], "won")
    await desk.sweep()
    assert await status(desk) == "frozen"
    desk.fake.state.close_dispute(opened[1], "won")
    await desk.sweep()
    assert ((await desk.balance()).posted, await status(desk)) == (100 * DOLLAR, "active")


async def test_an_operators_freeze_is_not_lifted_by_a_dispute(desk: Desk) -> None:
    topup = await desk.paid()
    async with desk.sessions.begin() as session:
        (await session.get_one(Organization, desk.organization_id)).status = "frozen"
    dispute = desk.fake.state.open_dispute(intent_of(topup))
    await desk.sweep()
    desk.fake.state.close_dispute(dispute, "won")
    await desk.sweep()
    assert await status(desk) == "frozen"


async def test_an_old_view_of_a_dispute_does_not_undo_its_end(desk: Desk) -> None:
    """Two handlers: the one that asked first writes last."""
    topup = await desk.paid()
    dispute = desk.fake.state.open_dispute(intent_of(topup))
    old = await desk.payments.retrieve_dispute(dispute["id"])
    await desk.sweep()
    desk.fake.state.close_dispute(dispute, "won")
    await desk.sweep()

    class Late:
        async def retrieve_dispute(self, dispute_id: str) -> object:
            return old

    await disputes.converge(desk.sessions, cast(Payments, Late()), dispute["id"])
    assert ((await desk.balance()).posted, await status(desk)) == (50 * DOLLAR, "active")
    assert await desk.failed_checks() == []


async def test_a_partly_disputed_payment_moves_only_that_part(desk: Desk) -> None:
    topup = await desk.paid()
    dispute = desk.fake.state.open_dispute(intent_of(topup))
    dispute["amount"] = 1_234
    (move,) = dispute["balance_transactions"]
    move["amount"] = -1_234
    desk.fake.state.moves[-1] = move
    await desk.sweep()
    assert (await desk.balance()).posted == 50 * DOLLAR - 1_234 * CENT
    assert await desk.failed_checks() == []
    assert await webhooks.process_due(desk.sessions, desk.payments, clock=desk.clock) == 0


async def test_a_refund_of_no_known_payment_touches_no_unpaid_topup(desk: Desk) -> None:
    topup = await desk.open_checkout()
    assert topup.payment_intent_id is None, "or this test could not fail"
    facts = RefundFacts(
        id="re_foreign",
        payment_intent_id=None,
        amount_cents=500,
        status="succeeded",
        refund_id=None,
    )
    await refunds.apply(desk.sessions, facts)
    async with read_only(desk.sessions) as session:
        assert await session.get(Refund, "re_foreign") is None
    assert (await desk.balance()).posted == 0


async def test_a_refund_or_dispute_that_is_heard_of_before_its_payment_counts(desk: Desk) -> None:
    """Webhooks come in any order, and an event that was handled once is not handled again."""
    state = desk.fake.state
    for end in (lambda intent: state.refund(intent, 500), state.open_dispute):
        topup = await desk.open_checkout(2_000)
        desk.fake.pay_session(topup.session_id or "", GOOD)
        end(state.all("payment_intent")[-1]["id"])
    later = ("refund.created", "charge.dispute.created")
    for event in state.events:
        if event["type"] in later:
            await desk.receive(*signed(event))
    await desk.process()
    assert (await desk.balance()).posted == 15 * DOLLAR
    await desk.sweep()
    assert (await desk.balance()).posted == 15 * DOLLAR
    assert await desk.failed_checks() == []


async def test_what_an_operator_has_released_is_not_frozen_by_the_same_news(desk: Desk) -> None:
    topup = await desk.paid()
    dispute = desk.fake.state.open_dispute(topup.payment_intent_id or "")
    await disputes.converge(desk.sessions, desk.payments, dispute["id"], clock=desk.clock)
    async with desk.sessions.begin() as session:
        await disputes.release(session, desk.organization_id, reason="known", actor="op")
    await disputes.converge(desk.sessions, desk.payments, dispute["id"], clock=desk.clock)
    assert await status(desk) == "active"
    desk.fake.state.close_dispute(dispute, "lost")
    await disputes.converge(desk.sessions, desk.payments, dispute["id"], clock=desk.clock)
    assert await status(desk) == "frozen"
