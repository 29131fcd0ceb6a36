"""The whole API over real Redis, a real database and a worker whose model is scripted."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import sqlalchemy
import tokenizers
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from accounts import api_keys
from accounts.api_keys import KeyRing
from accounts.passwords import PasswordHasher
from accounts.principal import ACCOUNT, INFERENCE, OPERATOR
from accounts.settings import AccountsSettings
from api.app import create_app
from api.dependencies import Services, open_services
from api.settings import ApiSettings
from billing import ledger, pricing, signup
from billing.ledger import Balance
from billing.money import NANO_PER_DOLLAR
from billing.settings import BillingSettings
from billing.stripe_settings import StripeSettings
from common.db import Sessions, create_engine, create_sessions, read_only
from common.ids import new_id
from common.settings import CommonSettings
from engine import catalog
from engine.broker.settings import BrokerSettings
from engine.tokenization import Tokenizer
from infra.connection import Connection
from tests.api.fake_worker import FakeWorker, Script
from tests.conftest import postgresql_copy

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTEXT_LENGTH = 8192
INPUT_PRICE, CACHED_PRICE, OUTPUT_PRICE = 20_000_000, 10_000_000, 80_000_000
PASSWORD = "correct horse battery staple"

ACCOUNTS = AccountsSettings(
    api_key_peppers={1: SecretStr("a pepper for tests")},
    argon2_memory_kib=64,
    argon2_iterations=1,
    signups_per_network=10_000,
)
BROKER = BrokerSettings(
    lease_ms=2_000, announce_interval_s=0.2, heartbeat_cache_s=0.05, worker_ms=1_000
)
API = ApiSettings(
    queue_report_interval_s=0.1, model_wait_s=1.0, drain_timeout_s=2.0, credit_pause_s=0.4
)


@dataclass(frozen=True)
class Customer:
    """An organization with a key for inference and account."""

    organization_id: str
    email: str
    key: str
    key_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


BILLING = BillingSettings(signup_credit_nano_usd=100 * NANO_PER_DOLLAR, credit_look_every_s=0.1)
STRIPE = StripeSettings(webhook_secret=SecretStr("whsec_of_the_tests"))


@cache
def fast_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@dataclass
class Platform:
    """Everything that a test of the API touches."""

    services: Services
    app: FastAPI
    client: httpx.AsyncClient
    worker: FakeWorker
    directory: Path
    customer: Customer

    def ids(self, text: str) -> tuple[int, ...]:
        """The tokens that spell `text`."""
        return tuple(fast_tokenizer(self.directory).encode(text, add_special_tokens=False).ids)

    def say(self, text: str = "", **script: Any) -> None:
        """From now on the model answers every request with `text`, then ends."""
        chosen = Script(token_ids=self.ids(text), **script)
        self.worker.script_of = lambda request: chosen

    async def post(
        self, path: str, body: Any = None, *, customer: Customer | None = None, **options: Any
    ) -> httpx.Response:
        headers = (customer or self.customer).headers
        return await self.client.post(path, json=body, headers=headers, **options)

    async def chat(self, content: str = "Hi", **parameters: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return await self.post("/v1/chat/completions", body | parameters)

    async def balance(self, customer: Customer | None = None) -> Balance:
        async with read_only(self.services.sessions) as session:
            return await ledger.balance(session, (customer or self.customer).organization_id)

    async def settled(self, customer: Customer | None = None) -> Balance:
        """The balance once nothing is held any more."""
        async with asyncio.timeout(5):
            while (balance := await self.balance(customer)).held:
                await asyncio.sleep(0.01)
        return balance

    async def sign_up(self, email: str) -> Customer:
        services = self.services
        return await sign_up(services.sessions, email, services.password_hasher, services.key_ring)

    async def issue(self, customer: Customer, *scopes: str) -> Customer:
        """The same organization with another key."""
        async with self.services.sessions.begin() as session:
            issued = await api_keys.issue(
                session,
                customer.organization_id,
                name="test",
                scopes=scopes or (INFERENCE, ACCOUNT, OPERATOR),
                created_by=None,
                key_ring=self.services.key_ring,
            )
        return Customer(customer.organization_id, customer.email, issued.plaintext, issued.key.id)

    async def set_balance(self, customer: Customer, nano_usd: int) -> None:
        """Adjust the ledger so that exactly so much is left."""
        balance = await self.balance(customer)
        if balance.posted == nano_usd:
            return
        async with self.services.sessions.begin() as session:
            await ledger.adjust_credit(
                session,
                customer.organization_id,
                nano_usd - balance.posted,
                reason="test",
                actor="test",
                key=new_id("key"),
            )


async def sign_up(
    sessions: Sessions, email: str, hasher: PasswordHasher, key_ring: KeyRing
) -> Customer:
    async with sessions.begin() as session:
        signed_up = await signup.sign_up(
            session,
            email=email,
            password=PASSWORD,
            hasher=hasher,
            key_ring=key_ring,
            accounts_settings=ACCOUNTS,
            billing_settings=BILLING,
        )
    issued = signed_up.issued_key
    return Customer(signed_up.organization.id, email, issued.plaintext, issued.key.id)


async def host_model(database_url: str, directory: Path) -> None:
    engine = create_engine(database_url)
    async with create_sessions(engine).begin() as session:
        await catalog.add_model(
            session,
            name=MODEL,
            path=str(directory),
            revision="test",
            architecture="LlamaForCausalLM",
            context_length=CONTEXT_LENGTH,
            dtype="float32",
            description="a small model",
        )
        await pricing.set_price(
            session, MODEL, input=INPUT_PRICE, cached=CACHED_PRICE, output=OUTPUT_PRICE
        )
    await engine.dispose()


@dataclass(frozen=True)
class Populated:
    """A database that hosts the model and knows one customer."""

    url: str
    customer: Customer


async def populate(database_url: str, directory: Path) -> Populated:
    """Host the model of `directory` and sign up a customer, with no platform running."""
    await host_model(database_url, directory)
    engine = create_engine(database_url)
    hasher = PasswordHasher(ACCOUNTS)
    try:
        customer = await sign_up(
            create_sessions(engine), "ada@example.com", hasher, KeyRing(ACCOUNTS.api_key_peppers)
        )
    finally:
        hasher.close()
        await engine.dispose()
    return Populated(database_url, customer)


@asynccontextmanager
async def open_platform(
    database: Populated, redis_url: str, directory: Path, **api: Any
) -> AsyncIterator[Platform]:
    common = CommonSettings(database_url=SecretStr(database.url), redis_url=SecretStr(redis_url))
    async with open_services(
        common=common,
        accounts=ACCOUNTS,
        billing=BILLING,
        stripe=STRIPE,
        broker=BROKER,
        api=API.model_copy(update=api),
    ) as services:
        worker = FakeWorker(redis_url, MODEL, BROKER).start()
        app = create_app(services)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
                # Tests about time must not meet the first use of a tokenizer.
                await services.tokenizers.get((await services.catalogue.find(MODEL)).model)
                yield Platform(
                    services=services,
                    app=app,
                    client=client,
                    worker=worker,
                    directory=directory,
                    customer=database.customer,
                )
        finally:
            worker.stop()


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_read_once() -> Iterator[None]:
    """A tokenizer takes a quarter of a second to read and never changes: one serves all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", cache(Tokenizer.load))
        yield


@pytest.fixture(scope="session")
def template_sqlite(
    migrated_sqlite: Path, default_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Populated:
    """A populated SQLite file to copy: to sign up anew for every test took longer than the test."""
    path = tmp_path_factory.mktemp("populated") / "template.sqlite3"
    shutil.copyfile(migrated_sqlite, path)
    return asyncio.run(populate(f"sqlite+aiosqlite:///{path}", default_model_directory))


def copied(template: Populated, path: Path) -> Populated:
    shutil.copyfile(template.url.removeprefix("sqlite+aiosqlite:///"), path)
    return replace(template, url=f"sqlite+aiosqlite:///{path}")


@pytest.fixture
def populated_sqlite(template_sqlite: Populated, tmp_path: Path) -> Populated:
    return copied(template_sqlite, tmp_path / "populated.sqlite3")


@pytest.fixture(scope="session")
def template_postgresql(postgresql_url: str, default_model_directory: Path) -> Iterator[Populated]:
    """The same in PostgreSQL."""
    with postgresql_copy(postgresql_url, "template_ncompass") as url:
        yield asyncio.run(populate(url, default_model_directory))


@pytest.fixture
def populated_postgresql(
    postgresql_url: str, template_postgresql: Populated
) -> Iterator[Populated]:
    template = sqlalchemy.make_url(template_postgresql.url).database
    assert template is not None
    with postgresql_copy(postgresql_url, template) as url:
        yield replace(template_postgresql, url=url)


@pytest.fixture(params=["populated_sqlite", "populated_postgresql"], ids=["sqlite", "postgresql"])
def populated(request: pytest.FixtureRequest) -> Populated:
    """A populated database, once on each engine that the product supports."""
    chosen: Populated = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
async def platform(
    populated_sqlite: Populated, clean_redis: str, default_model_directory: Path
) -> AsyncIterator[Platform]:
    """The API on SQLite."""
    async with open_platform(populated_sqlite, clean_redis, default_model_directory) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_platform(
    template_sqlite: Populated,
    redis_url: str,
    default_model_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Platform]:
    """One API for all tests of a module that leave nothing behind, such as those about 400s."""
    database = copied(template_sqlite, tmp_path_factory.mktemp("module") / "ncompass.sqlite3")
    async with open_platform(database, redis_url, default_model_directory) as opened:
        yield opened


@pytest.fixture
async def platform_on_each_database(
    populated: Populated, clean_redis: str, default_model_directory: Path
) -> AsyncIterator[Platform]:
    """The API on SQLite and on PostgreSQL: for tests about money."""
    async with open_platform(populated, clean_redis, default_model_directory) as opened:
        yield opened


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the test run."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """`app` on a free port of 127.0.0.1, in this loop; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=Connection, lifespan="off", log_config=None, access_log=False, **options
        )
        server = QuietServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def base_url(platform: Platform) -> AsyncIterator[str]:
    """The API by a real uvicorn."""
    async with serving(platform.app) as url:
        yield url
