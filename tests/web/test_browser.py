"""The way of a new customer in a real Chromium, against a real server."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from redis.asyncio import Redis

from billing.gateways import GatewayLease
from billing.stripe_client import Payments
from common.db import create_engine, create_sessions
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.fake_stripe.state import DECLINED, GOOD
from tests.billing.payments import fake, running_stripe, settings_of
from tests.services import free_port
from tests.web.site import KEY, MODEL, PASSWORD, WEB, Site, make_services, make_site
from tests.web.test_isolation import organization_of

__all__ = ["fake", "running_stripe"]

pytestmark = pytest.mark.browser

THEMES = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]


class RunningSite:
    """The site on a port, in a thread with an event loop of its own."""

    def __init__(self, database_url: str, redis_url: str, stripe: FakeStripe) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.site: Site
        self._addresses = (database_url, redis_url)
        self._stripe = stripe
        self._loop = asyncio.new_event_loop()
        self._server: uvicorn.Server
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def start(self) -> None:
        self._thread.start()
        assert self._is_ready.wait(20)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    def use(self, email: str) -> None:
        """One finished request of that customer."""

        async def use() -> None:
            await self.site.use(await organization_of(self.site, email))

        asyncio.run_coroutine_threadsafe(use(), self._loop).result(20)

    async def _serve(self) -> None:
        database_url, redis_url = self._addresses
        engine = create_engine(database_url)
        redis = Redis.from_url(redis_url)
        payments = Payments(settings_of(self._stripe))
        services = make_services(
            create_sessions(engine),
            redis,
            payments=payments,
            web_settings=WEB.model_copy(update={"checkout_origin": self._stripe.base_url}),
        )
        self.site = make_site(services)
        await GatewayLease(services.sessions, "gw_tests", lease_s=60).renew()
        await self.site.hold_writer.start()
        await self.site.host()
        config = uvicorn.Config(self.site.app, port=self.port, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._is_ready.set()
        await self._server.serve()
        await self.site.hold_writer.stop()
        services.password_hasher.close()
        await payments.close()
        await redis.aclose()
        await engine.dispose()


@pytest.fixture
def running(sqlite_url: str, clean_redis: str, fake: FakeStripe) -> Iterator[RunningSite]:
    running = RunningSite(sqlite_url, clean_redis, fake)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh browser profile; whatever the console complains about fails the test, but for a form
    that was refused."""
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert [line for line in complaints if "422" not in line] == []


def test_from_sign_up_to_the_first_bill(running: RunningSite, page: Any) -> None:
    # 1. sign up, and find the key and the credit
    page.goto(running.url)
    page.get_by_role("link", name="Create an account").click()
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create account").click()
    page.wait_for_url("**/welcome")
    key = KEY.fullmatch(page.locator("#api-key").inner_text())
    assert key is not None
    assert "$100.00" in page.locator(".figure-inline").inner_text()
    command = page.locator("#curl").inner_text()
    assert key[0] in command
    assert running.url in command
    page.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == command.strip()

    # 2. neither Back nor Reload brings the key back
    page.get_by_role("link", name="See what it cost").click()
    page.wait_for_url("**/usage")
    assert "No requests yet" in page.content()
    page.go_back()
    page.wait_for_url("**/welcome")
    assert key[0] not in page.content()
    page.reload()
    assert key[0] not in page.content()

    # 3. a second key, shown once, then revoked
    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Create key").click()
    page.wait_for_url("**/keys/created")
    assert KEY.fullmatch(page.locator("#api-key").inner_text())
    page.get_by_role("link", name="Back to your keys").click()
    page.get_by_role("link", name="Revoke laptop").click()
    page.get_by_role("button", name="Revoke key").click()
    page.wait_for_url("**/keys")
    assert "Revoked" in page.locator("tr", has_text="laptop").inner_text()

    # 4. usage appears with its cost and its chart
    running.use("ada@example.com")
    page.get_by_role("link", name="Usage", exact=True).click()
    assert page.locator("svg.chart rect.series-0").count() == 1
    assert "84 ms" in page.locator("table.requests").inner_text()
    page.get_by_role("link", name="Tokens").click()
    page.get_by_text("Data table").click()
    assert page.locator(".data td", has_text=MODEL).is_visible()

    # 5. ask for a model, after a mistake
    page.get_by_role("link", name="Models", exact=True).first.click()
    page.get_by_label("Hugging Face id").fill("nonsense")
    page.get_by_role("button", name="Ask for it").click()
    assert "owner/name" in page.locator("#error-name").inner_text()
    page.get_by_label("Hugging Face id").fill("Qwen/Qwen3-0.6B")
    page.get_by_role("button", name="Ask for it").click()
    assert "open" in page.locator(".asked li", has_text="Qwen/Qwen3-0.6B").inner_text()

    # 6. out, and in again
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url(f"{running.url}/")
    page.goto(f"{running.url}/keys")
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/keys")


def test_a_top_up_is_paid_on_stripes_page_and_is_there_on_return(
    running: RunningSite, page: Any, fake: FakeStripe
) -> None:
    page.goto(f"{running.url}/signup")
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create account").click()
    page.wait_for_url("**/welcome")
    page.get_by_role("link", name="Billing").click()
    page.get_by_label("Amount in dollars").fill("25.50")
    page.get_by_label("Save the card").check()
    page.get_by_role("button", name="Continue to payment").click()
    page.wait_for_url("**/c/pay/*")
    for card in (DECLINED, GOOD):
        page.get_by_label("Card number").fill(card)
        page.get_by_role("button", name="Pay").click()
        if card == DECLINED:
            assert page.get_by_role("alert").inner_text() == "card_declined"
    page.wait_for_url("**/billing")
    assert "$125.50" in page.locator(".figure-main").inner_text()
    assert "visa 4242" in page.content()
    page.get_by_label("Charge the saved card by itself").check()
    page.get_by_role("button", name="Save recharge").click()
    assert page.locator(".state-on").count() == 1
    assert len(fake.state.all("charge")) == 1


@pytest.mark.parametrize(("scheme", "width"), THEMES)
def test_pages_fit_their_screen_and_can_be_read(
    running: RunningSite, browser: Any, scheme: str, width: int
) -> None:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 844}, java_script_enabled=True
    )
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(f"{running.url}/signup")
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create account").click()
    page.wait_for_url("**/welcome")
    running.use("ada@example.com")
    paths = (
        "/",
        "/usage",
        "/billing",
        "/keys",
        "/models",
        "/playground",
        f"/models/{MODEL}",
        "/docs/quickstart",
        "/status",
        "/forgot",
        "/forgot/sent",
        "/reset?token=guess",
        "/reset/done",
    )
    for path in paths:
        page.goto(running.url + path)
        wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, f"{path} scrolls sideways at {width} px"
        faint = page.evaluate(FAINT_TEXT)
        assert faint == [], f"{path}, {scheme}: too little contrast in {faint}"
    context.close()


def test_everything_works_without_javascript(running: RunningSite, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(f"{running.url}/signup")
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create account").click()
    page.wait_for_url("**/welcome")
    assert KEY.fullmatch(page.locator("#api-key").inner_text())
    assert page.get_by_role("button", name="Copy").count() == 0
    context.close()


FAINT_TEXT = """
() => {
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const backdrop = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      const parts = numbers(colour);
      if (colour.startsWith("rgb") && (parts.length === 3 || parts[3] === 1)) return parts;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!text || element.closest("svg, .visually-hidden, .skip") || !element.offsetParent) continue;
    const [a, b] = [numbers(getComputedStyle(element).color), backdrop(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${element.className || element.tagName} ${ratio.toFixed(2)}`);
  }
  return [...new Set(faint)];
}
"""
