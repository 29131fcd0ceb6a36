"""The billing page: top-ups, recharge, warnings, the ledger; without and with Stripe."""

from collections.abc import AsyncIterator

import pytest

from billing.stripe_client import Payments
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.fake_stripe.state import GOOD
from tests.billing.payments import fake, running_stripe, settings_of
from tests.web.site import ORIGIN, Site, Tab, make_services, make_site
from tests.web.test_isolation import organization_of

__all__ = ["fake", "running_stripe"]


@pytest.fixture
async def paying(site: Site, fake: FakeStripe) -> AsyncIterator[Tab]:
    """A customer of a site with Stripe."""
    payments = Payments(settings_of(fake))
    services = make_services(site.services.sessions, site.services.redis, payments=payments)
    tab = make_site(services).tab()
    site.tabs.append(tab)
    await tab.sign_up("ada@example.com")
    await tab.open("/billing")
    yield tab
    await payments.close()
    services.password_hasher.close()


async def test_without_a_key_the_page_says_that_payments_are_not_set_up(tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/billing")
    assert "Payments are not set up on this machine" in tab.page
    assert "Free credit for a new account" in tab.page
    assert "$100.00" in tab.page
    response = await tab.send("/billing/topup", amount="25")
    assert response.status_code == 422
    assert "not set up" in response.text


async def test_a_topup_goes_to_stripe_and_comes_back_as_credit(
    site: Site, paying: Tab, fake: FakeStripe
) -> None:
    click = paying.page.split('name="click" value="')[1].split('"')[0]
    first = await paying.send("/billing/topup", amount="25.00", click=click, save_card="on")
    again = await paying.send("/billing/topup", amount="25.00", click=click, save_card="on")
    assert first.status_code == again.status_code == 303
    assert first.headers["location"] == again.headers["location"]
    session_id = first.headers["location"].rsplit("/", 1)[1]
    assert fake.pay_session(session_id, GOOD) is None
    back = fake.state.objects[session_id]["success_url"].removeprefix(ORIGIN)
    for _ in range(3):
        response = await paying.open(back)
        assert response.url.path == "/billing"
    assert "$125.00" in paying.page
    assert "visa 4242" in paying.page
    assert f"{fake.base_url}/receipts/" in paying.page

    stranger = Tab(paying.app)
    await stranger.sign_up("bob@example.com")
    assert (await stranger.open(back)).status_code == 404
    await stranger.client.aclose()


async def test_amounts_are_dollars_and_whole_cents(paying: Tab) -> None:
    for amount in ("", "abc", "25.001", "-25", "1e3", "4.99", "5000.01", "9" * 11):
        response = await paying.send("/billing/topup", amount=amount)
        assert response.status_code == 422, amount
        assert 'id="error-amount"' in response.text


async def test_an_unreachable_stripe_is_said_on_the_form(paying: Tab, fake: FakeStripe) -> None:
    fake.faults.append("down")
    response = await paying.send("/billing/topup", amount="25")
    assert response.status_code == 422
    assert "Stripe cannot be reached" in response.text


async def test_recharge_needs_a_card_and_sensible_amounts(paying: Tab, fake: FakeStripe) -> None:
    fields = {"is_on": "on", "threshold": "10", "recharge": "25", "month_cap": "100"}
    response = await paying.send("/billing/recharge", **fields)
    assert (response.status_code, "Save a card" in response.text) == (422, True)
    response = await paying.send("/billing/recharge", **fields | {"month_cap": "20"})
    assert 'id="error-month_cap"' in response.text
    response = await paying.send("/billing/topup", amount="25", save_card="on")
    session_id = response.headers["location"].rsplit("/", 1)[1]
    fake.pay_session(session_id, GOOD)
    await paying.open(fake.state.objects[session_id]["success_url"].removeprefix(ORIGIN))
    await paying.submit("/billing/recharge", **fields)
    assert "state-on" in paying.page
    await paying.submit("/billing/recharge", **fields | {"is_on": ""})
    assert "state-off" in paying.page


async def test_warnings_can_be_chosen(site: Site, paying: Tab) -> None:
    await paying.submit("/billing/alerts", below="7.50", webhook_url="https://example.com/hook")
    assert 'value="7.50"' in paying.page
    assert "whsec_" in paying.page
    response = await paying.send("/billing/alerts", below="7", webhook_url="ftp://x")
    assert 'id="error-webhook_url"' in response.text


async def test_the_ledger_shows_every_movement_to_the_nano_dollar(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await site.use(await organization_of(site, "ada@example.com"), tokens=(101, 0, 1))
    await tab.open("/billing")
    assert "\N{MINUS SIGN}$0.000002100" in tab.page
