"""The web application on real services, and browsers without a screen to visit it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import SecretStr
from redis.asyncio import Redis

from accounts.api_keys import KeyRing
from accounts.passwords import PasswordHasher
from accounts.settings import AccountsSettings
from accounts.throttle import Throttle
from billing import pricing
from billing.hold_operations import AdmitHold, Outcome, SettleHold, UsageFacts
from billing.holds import HoldWriter
from billing.settings import BillingSettings
from common.clock import utc_now_us
from common.db import Sessions
from engine import catalog
from engine.pooling import ModelKind
from web.app import create_app
from web.services import WebServices
from web.settings import WebSettings

ORIGIN = "http://ncompass.test"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PASSWORD = "correct horse battery staple"
TOKEN = re.compile(r'name="csrf_token" value="([^"]+)"')
KEY = re.compile(r"sk_ncompass_[A-Za-z0-9]{12}_[A-Za-z0-9]{38}")

ACCOUNTS = AccountsSettings(
    api_key_peppers={1: SecretStr("a pepper for tests")},
    argon2_memory_kib=64,
    argon2_iterations=1,
    signups_per_network=10_000,
    login_attempts_per_network=10_000,
)
WEB = WebSettings(cookie_secret=SecretStr("a cookie secret for tests"))


@dataclass
class Tab:
    """A browser with one tab: keeps cookies, and fills in forms as they stand in the page."""

    app: FastAPI
    page: str = ""
    client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url=ORIGIN)

    async def open(self, path: str) -> httpx.Response:
        """Follow a link; redirects too."""
        response = await self.client.get(path, follow_redirects=True)
        self.page = response.text
        return response

    async def send(self, path: str, **fields: str) -> httpx.Response:
        """Submit a form of the page that is open, with its token; does not follow."""
        token = TOKEN.search(self.page)
        assert token is not None, "the open page has no form"
        data = {"csrf_token": token[1]} | fields
        response = await self.client.post(path, data=data, headers={"origin": ORIGIN})
        if response.status_code != 303:
            self.page = response.text
        return response

    async def submit(self, path: str, **fields: str) -> httpx.Response:
        """Submit a form and follow the redirect."""
        response = await self.send(path, **fields)
        assert response.status_code == 303, f"{response.status_code}: {response.text[-2000:]}"
        return await self.open(response.headers["location"])

    async def sign_up(self, email: str, password: str = PASSWORD) -> str:
        """Sign up and return the key on the welcome page."""
        await self.open("/signup")
        await self.submit("/signup", email=email, password=password)
        key = KEY.search(self.page)
        assert key is not None, "no key on the welcome page"
        return key[0]


@dataclass
class Site:
    """One web application and what it stands on."""

    app: FastAPI
    services: WebServices
    hold_writer: HoldWriter
    tabs: list[Tab] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def tab(self) -> Tab:
        """A browser that has never been here."""
        tab = Tab(self.app)
        self.tabs.append(tab)
        return tab

    async def host(
        self,
        name: str = MODEL,
        *,
        price: tuple[int, int, int] | None = None,
        kind: ModelKind = "generate",
    ) -> None:
        """Put a model with a price into the catalogue."""
        async with self.services.sessions.begin() as session:
            await catalog.add_model(
                session,
                name=name,
                path="/models/any",
                revision="main",
                architecture="LlamaForCausalLM",
                context_length=8192,
                dtype="bfloat16",
                description="A small, quick instruction model.",
                kind=kind,
            )
            fresh, cached, output = price or (20_000_000, 5_000_000, 80_000_000)
            await pricing.set_price(session, name, input=fresh, cached=cached, output=output)

    async def use(
        self,
        organization_id: str,
        *,
        model: str = MODEL,
        tokens: tuple[int, int, int] = (100, 20, 50),
        outcome: Outcome = "completed",
        facts: UsageFacts | None = None,
        request_id: str | None = None,
    ) -> str:
        """One finished request: tokens are uncached input, cached input, output."""
        request_id = request_id or f"req_{organization_id[-6:]}_{next(self._numbers)}"
        async with self.services.sessions() as session:
            price = await pricing.current_price(session, model)
        uncached, cached, output = tokens
        hold = await self.hold_writer.admit(
            AdmitHold(
                request_id=request_id,
                organization_id=organization_id,
                api_key_id=None,
                model=model,
                price_id=price.id,
                gateway="gw_tests",
                input_tokens=uncached + cached,
                output_tokens=max(output, 1),
            )
        )
        facts = facts or UsageFacts(ttft_us=84_000, finish_reason="stop", streamed=True)
        await self.hold_writer.settle(
            SettleHold(request_id, hold.epoch, uncached, cached, output, outcome, facts)
        )
        return request_id


def make_services(sessions: Sessions, redis: Redis, **changed: Any) -> WebServices:
    """Services for tests: real, with quick passwords."""
    accounts_settings = changed.pop("accounts_settings", ACCOUNTS)
    assert isinstance(accounts_settings, AccountsSettings)
    values: dict[str, Any] = {
        "sessions": sessions,
        "redis": redis,
        "password_hasher": PasswordHasher(accounts_settings),
        "throttle": Throttle(redis, accounts_settings),
        "key_ring": KeyRing(accounts_settings.api_key_peppers),
        "accounts_settings": accounts_settings,
        "billing_settings": BillingSettings(),
        "web_settings": WEB,
        "clock": utc_now_us,
    }
    return WebServices(**(values | changed))


def make_site(services: WebServices) -> Site:
    """A site on these services; its hold writer is not started."""
    writer = HoldWriter(services.sessions, clock=services.clock)
    return Site(create_app(services), services, writer)


def routes_of(app: FastAPI) -> list[APIRoute]:
    """Every page route of the application, those of included routers too."""
    return [route for route in _walk(app.routes) if isinstance(route, APIRoute)]


def _walk(routes: Any) -> Iterator[Any]:
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from _walk(inner.routes)
