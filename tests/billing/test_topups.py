"""Top-ups against a hostile Stripe: credit comes once, for what was paid, or not at all."""

import asyncio
from contextlib import suppress
from itertools import permutations
from typing import cast

import pytest
from sqlalchemy.exc import OperationalError

from billing import payment_sweeps, topups, webhooks
from billing.errors import (
    InvalidAmount,
    LedgerConflict,
    PaymentMismatch,
    PaymentsOff,
    PaymentsUnavailable,
    TopupNotFound,
)
from billing.payment_models import StripeEvent, Topup
from billing.payment_profiles import find_profile
from billing.stripe_client import Payments
from common.db import Sessions, read_only
from tests.billing.conftest import Books
from tests.billing.fake_stripe.pump import Pump, signed
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.fake_stripe.state import DECLINED, GOOD, SLOW
from tests.billing.faults import Fault, FaultyBegin
from tests.billing.payments import (
    CENT,
    DOLLAR,
    Desk,
    database_url,
    desk,
    fake,
    on_both_databases,
    running_stripe,
    settings_of,
)

__all__ = ["database_url", "desk", "fake", "running_stripe"]


def session_of(topup: Topup) -> str:
    assert topup.session_id is not None
    return topup.session_id


@on_both_databases
async def test_a_payment_is_credited_once_however_often_we_hear_of_it(desk: Desk) -> None:
    """AutoGPT 10672, lago 2243, saleor 14648: return page and concurrent webhooks credited twice."""
    topup = await desk.open_checkout()
    desk.fake.pay_session(session_of(topup), GOOD)
    intent = desk.fake.state.all("payment_intent")[0]
    for _ in range(5):
        await desk.pump.pump(is_adversarial=False)
    await asyncio.gather(
        *(topups.converge_checkout(desk.sessions, desk.payments, session_of(topup)) for _ in "123"),
        *(topups.converge_intent(desk.sessions, desk.payments, intent["id"]) for _ in "123"),
        webhooks.process_due(desk.sessions, desk.payments),
        webhooks.process_due(desk.sessions, desk.payments),
        payment_sweeps.sweep(desk.sessions, desk.payments),
    )
    await desk.process()
    balance = await desk.balance()
    assert (balance.posted, balance.paid, balance.promotional) == (50 * DOLLAR, 50 * DOLLAR, 0)
    paid = await desk.topup(topup.id)
    assert (paid.state, paid.payment_intent_id) == ("paid", intent["id"])
    assert paid.receipt_url == f"{desk.fake.base_url}/receipts/{intent['id']}"
    assert await desk.failed_checks() == []


async def test_every_order_of_the_events_gives_the_same_books(desk: Desk) -> None:
    topup = await desk.open_checkout()
    desk.fake.pay_session(session_of(topup), DECLINED)
    desk.fake.pay_session(session_of(topup), GOOD)
    events = desk.fake.state.events
    assert len(events) == 3
    for order in permutations(events):
        for event in order:
            await desk.receive(*signed(event | {"id": f"{event['id']}_{order.index(event)}"}))
            await desk.process()
    assert (await desk.balance()).posted == 50 * DOLLAR
    assert (await desk.topup(topup.id)).state == "paid"
    assert await desk.failed_checks() == []


@on_both_databases
async def test_a_double_click_pays_on_one_page(desk: Desk) -> None:
    """lago 5870: top-ups without idempotency; Cellarion 632: two customers for one."""
    opened = await asyncio.gather(*(desk.open_checkout(key="click") for _ in range(3)))
    assert len({(topup.id, topup.session_id) for topup in opened}) == 1
    assert len(desk.fake.state.all("checkout.session")) == 1
    assert len(desk.fake.state.all("customer")) == 1
    with pytest.raises(LedgerConflict):
        await desk.open_checkout(6_000, key="click")


@pytest.mark.parametrize("cents", [0, -5_000, 499, 500_001, 2**63])
async def test_an_amount_is_within_its_limits(desk: Desk, cents: int) -> None:
    with pytest.raises(InvalidAmount):
        await desk.open_checkout(cents)
    assert desk.fake.state.calls == []


async def test_what_was_paid_must_be_what_was_asked_for(desk: Desk) -> None:
    topup = await desk.open_checkout()
    desk.fake.pay_session(session_of(topup), GOOD)
    intent = desk.fake.state.all("payment_intent")[0]
    for wrong in ({"amount_received": 4_999}, {"currency": "jpy"}):
        right = {name: intent[name] for name in wrong}
        intent |= wrong
        with pytest.raises(PaymentMismatch):
            await topups.converge_intent(desk.sessions, desk.payments, intent["id"])
        intent |= right
    desk.fake.state.objects[session_of(topup)]["amount_subtotal"] = 1
    with pytest.raises(PaymentMismatch):
        await topups.converge_checkout(desk.sessions, desk.payments, session_of(topup))
    assert (await desk.balance()).posted == 0


async def test_a_slow_payment_is_credited_when_it_comes_through(desk: Desk) -> None:
    came, bounced = await desk.open_checkout(2_000), await desk.open_checkout(3_000)
    for topup in (came, bounced):
        desk.fake.pay_session(session_of(topup), SLOW)
    await desk.pump.pump()
    await desk.sweep()
    assert (await desk.topup(came.id)).state == "processing"
    assert (await desk.balance()).posted == 0
    sessions = desk.fake.state.objects
    desk.fake.state.settle_slow_payment(sessions[session_of(came)], is_paid=True)
    desk.fake.state.settle_slow_payment(sessions[session_of(bounced)], is_paid=False)
    await desk.pump.pump()
    await desk.sweep()
    assert (await desk.balance()).posted == 20 * DOLLAR
    lost = await desk.topup(bounced.id)
    assert (lost.state, lost.failure) == ("failed", "debit_bounced")
    assert await desk.failed_checks() == []


async def test_a_page_that_nobody_paid_on_expires(desk: Desk) -> None:
    topup = await desk.open_checkout()
    desk.fake.expire_session(session_of(topup))
    await desk.pump.pump(is_adversarial=False)
    await desk.process()
    assert (await desk.topup(topup.id)).state == "expired"


async def test_payments_of_somebody_else_are_left_alone(desk: Desk) -> None:
    state = desk.fake.state
    foreign = state.create_intent(amount=700, currency="usd", customer="cus_x", metadata={})
    state.pay(foreign, GOOD, is_owner_there=True)
    state.refund(foreign["id"], 100)
    state.open_dispute(foreign["id"])
    await desk.pump.pump(is_adversarial=False)
    await desk.process()
    async with read_only(desk.sessions) as session:
        events = [await session.get_one(StripeEvent, event["id"]) for event in state.events]
    assert [event.error for event in events] == [None] * len(events)
    assert all(event.processed_at for event in events)
    assert (await desk.balance()).posted == 0


async def test_webhooks_that_never_came_are_fetched(desk: Desk) -> None:
    paid = [await desk.open_checkout(cents) for cents in (1_000, 2_000, 3_000)]
    for topup in paid:
        desk.fake.pay_session(session_of(topup), GOOD)
    await desk.sweep()
    assert (await desk.balance()).posted == 60 * DOLLAR
    desk.fake.state.refund(desk.fake.state.all("payment_intent")[1]["id"], 500)
    await desk.sweep()
    assert (await desk.balance()).posted == 55 * DOLLAR
    assert await desk.failed_checks() == []


async def test_a_checkout_that_was_never_opened_is_given_up_after_a_day(desk: Desk) -> None:
    desk.fake.faults.extend(["", "down"])
    with pytest.raises(PaymentsUnavailable):
        await desk.open_checkout(key="click")
    async with desk.sessions.begin() as session:
        topup = await topups.start(
            session, desk.organization_id, amount_cents=5_000, idempotency_key="click"
        )
    assert topup is not None
    desk.pass_time(600)
    await desk.sweep()
    assert (await desk.topup(topup.id)).state == "pending"
    desk.pass_time(86_400)
    await desk.sweep()
    assert (await desk.topup(topup.id)).state == "expired"


async def test_a_webhook_must_be_signed_by_stripe_and_young(desk: Desk) -> None:
    topup = await desk.open_checkout()
    desk.fake.pay_session(session_of(topup), GOOD)
    event = desk.fake.state.events[0]
    body, header = signed(event)
    wrong = [
        (body + b" ", header),
        (body, ""),
        (body, "t=1,v1=00"),
        (body, "nonsense"),
        signed(event, secret="whsec_of_an_attacker"),
        signed(event, age_s=301),
        (b"\xff", header),
    ]
    for payload, signature in wrong:
        with pytest.raises(PaymentMismatch):
            await desk.receive(payload, signature)
    for nonsense in ({"created": 0}, {"created": 0, "id": "evt", "type": "refund.created"}):
        with pytest.raises(PaymentMismatch):
            await desk.receive(*signed(nonsense))
    off = settings_of(desk.fake).model_copy(update={"webhook_secret": None})
    async with desk.sessions() as session:
        with pytest.raises(PaymentsOff):
            await webhooks.receive(session, body, header, settings=off)
        assert await webhooks.receive(session, body, header, settings=settings_of(desk.fake))
        assert not await webhooks.receive(session, body, header, settings=settings_of(desk.fake))
        assert not await webhooks.receive(
            session, *signed(event | {"type": "invoice.paid"}), settings=settings_of(desk.fake)
        )


async def test_an_event_that_cannot_be_handled_waits_and_keeps_nobody_else_waiting(
    desk: Desk,
) -> None:
    """LibreChat 13812: the event's id was stored before its effect, so a retry was thrown away."""
    topup = await desk.open_checkout()
    desk.fake.pay_session(session_of(topup), GOOD)
    lost = {"id": "evt_0", "created": 1, "type": "refund.created"}
    await desk.receive(*signed(lost | {"data": {"object": {"id": "re_unknown"}}}))
    await desk.pump.pump(is_adversarial=False)
    desk.fake.faults.extend(["", "500"])
    done = await webhooks.process_due(desk.sessions, desk.payments, clock=desk.clock)
    assert done == 1, "of three, one met a 500 and one is unknown to Stripe"
    await desk.process()
    assert (await desk.balance()).posted == 50 * DOLLAR
    async with read_only(desk.sessions) as session:
        unknown = await session.get_one(StripeEvent, "evt_0")
        assert (unknown.processed_at, unknown.error) == (None, "payment_refused")


@on_both_databases
@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_crash_around_a_commit_neither_loses_nor_doubles_credit(
    desk: Desk, fault: Fault
) -> None:
    topup = await desk.open_checkout(is_card_saved=True)
    desk.fake.pay_session(session_of(topup), GOOD)
    await desk.pump.pump(is_adversarial=False)
    broken = FaultyBegin(desk.sessions)
    for good_commits in range(4):
        broken.planned = [*[None] * good_commits, fault]
        desk.pass_time(7_200)
        with suppress(OperationalError):  # the worker died there
            await webhooks.process_due(cast(Sessions, broken), desk.payments, clock=desk.clock)
        assert broken.planned == [] or good_commits > 1
    await desk.process()
    assert (await desk.balance()).posted == 50 * DOLLAR
    assert await desk.failed_checks() == []


async def test_the_card_is_saved_when_its_owner_said_so(desk: Desk) -> None:
    await desk.paid()
    async with read_only(desk.sessions) as session:
        profile = await find_profile(session, desk.organization_id)
        assert profile is not None
        assert profile.payment_method_id is None
    await desk.paid(is_card_saved=True)
    async with read_only(desk.sessions) as session:
        profile = await find_profile(session, desk.organization_id)
        assert profile is not None
        assert (profile.card_label, profile.is_recharge_on) == ("visa 4242", False)


async def test_a_topup_is_its_own_organizations(books: Books, desk: Desk) -> None:
    topup = await desk.paid()
    async with read_only(desk.sessions) as session:
        assert (await topups.find(session, desk.organization_id, topup.id)).id == topup.id
        assert [t.id for t in await topups.recent(session, desk.organization_id, 5)] == [topup.id]
        with pytest.raises(TopupNotFound):
            await topups.find(session, books.organization_id, topup.id)
        assert await topups.recent(session, books.organization_id, 5) == []


@pytest.mark.parametrize("seed", range(4))
async def test_any_loss_order_and_repetition_ends_in_the_same_books(desk: Desk, seed: int) -> None:
    desk.pump = Pump(desk.fake, desk.receive, seed=seed)
    state = desk.fake.state
    opened = [await desk.open_checkout(cents) for cents in (1_000, 2_000, 3_000, 4_000)]
    for topup in opened[:3]:
        desk.fake.pay_session(session_of(topup), GOOD)
    await desk.pump.pump()
    await desk.process()
    first, second, third = (intent["id"] for intent in state.all("payment_intent"))
    refunds = [state.refund(first, 300), state.refund(first, 200), state.refund(second, 2_000)]
    await desk.pump.pump()
    state.fail_refund(refunds[1])
    won, lost = state.open_dispute(third), state.open_dispute(first)
    await desk.pump.pump()
    state.close_dispute(won, "won")
    state.close_dispute(lost, "lost")
    await desk.pump.pump()
    await desk.sweep()
    at_stripe = sum(move["amount"] for move in state.moves)
    assert (await desk.balance()).posted == at_stripe * CENT
    assert await desk.failed_checks() == []


async def test_a_difference_to_stripe_is_found(desk: Desk) -> None:
    await desk.paid()
    desk.fake.state.move("charge", 1)
    (found,) = await desk.failed_checks()
    assert found.startswith("the clearing account equals Stripe: stripe_clearing differs by")


async def test_an_unreachable_stripe_is_named(fake: FakeStripe) -> None:
    payments = Payments(settings_of(fake).model_copy(update={"api_base": "http://127.0.0.1:1"}))
    with pytest.raises(PaymentsUnavailable):
        await payments.retrieve_intent("pi_1")
    await payments.close()
