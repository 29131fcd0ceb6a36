"""An answer whose credit ends pauses, an automatic recharge pays, and the answer goes on."""

import asyncio

from billing import recharge
from billing.payment_profiles import set_recharge
from billing.stripe_client import Payments
from tests.api.conftest import Platform
from tests.api.credit import assert_reconciled, paused, price_of, set_slices
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.payments import Desk, fake, running_stripe, settings_of

__all__ = ["fake", "running_stripe"]

STORY = "One two three four five six seven eight nine ten eleven twelve thirteen."


def desk_of(platform: Platform, fake: FakeStripe) -> Desk:
    """The customer of the platform, who may pay at the fake Stripe."""
    organization_id = platform.customer.organization_id
    return Desk(platform.services.sessions, organization_id, Payments(settings_of(fake)), fake)


async def test_an_automatic_recharge_lets_a_paused_answer_go_on(
    platform_on_each_database: Platform, fake: FakeStripe
) -> None:
    platform = platform_on_each_database
    set_slices(platform, 4, pause_s=20)
    platform.say(STORY, delay_s=0.001)
    desk = desk_of(platform, fake)
    await desk.paid(is_card_saved=True)
    async with desk.sessions.begin() as session:
        await set_recharge(
            session,
            desk.organization_id,
            is_on=True,
            threshold_cents=0,
            amount_cents=1_000,
            month_cap_cents=5_000,
        )
    await platform.set_balance(platform.customer, await price_of(platform, 6))
    answering = asyncio.create_task(platform.chat(stream=True))
    await paused(platform)
    assert await recharge.run_due(desk.sessions, desk.payments, clock=desk.clock) == 1
    response = await answering
    assert ": paused code=insufficient_credit" in response.text
    assert "thirteen" in response.text
    await desk.payments.close()
    assert (await platform.settled()).posted > 9 * 1_000_000_000
    await assert_reconciled(platform)
