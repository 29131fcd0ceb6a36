"""A customer who pays, and the fake Stripe that they pay at."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from billing import ledger, payment_sweeps, topups, webhooks
from billing.ledger import Balance
from billing.models import Balance as BalanceRecord
from billing.payment_models import StripeEvent, Topup
from billing.reconcile import reconcile
from billing.stripe_client import Payments
from billing.stripe_settings import StripeSettings
from billing.topups import ReturnPages
from common.clock import utc_now_us
from common.db import Sessions, read_only
from common.ids import new_id
from tests.billing.conftest import Books
from tests.billing.fake_stripe.pump import WEBHOOK_SECRET, Pump
from tests.billing.fake_stripe.server import API_KEY, FakeStripe
from tests.billing.fake_stripe.state import GOOD

CENT = 10_000_000
DOLLAR = 100 * CENT


def settings_of(fake: FakeStripe) -> StripeSettings:
    return StripeSettings(
        api_key=SecretStr(API_KEY),
        webhook_secret=SecretStr(WEBHOOK_SECRET),
        api_base=fake.base_url,
        timeout_s=5,
        max_network_retries=0,
    )


@dataclass
class Desk:
    """One customer, without any credit, and what they and Stripe can do."""

    sessions: Sessions
    organization_id: str
    payments: Payments
    fake: FakeStripe
    pump: Pump = field(init=False)
    now_us: int = field(default_factory=utc_now_us)

    def __post_init__(self) -> None:
        self.pump = Pump(self.fake, self.receive)
        self.fake.state.now_s = lambda: self.now_us // 1_000_000

    def clock(self) -> int:
        """Moves by a microsecond each time that it is read, and by hours when a test says so."""
        self.now_us += 1
        return self.now_us

    def pass_time(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000

    async def receive(self, payload: bytes, signature: str) -> None:
        async with self.sessions.begin() as session:
            await webhooks.receive(
                session, payload, signature, settings=settings_of(self.fake), clock=self.clock
            )

    async def process(self) -> None:
        """The inbox until nothing is due, retries included."""
        for _ in range(12):
            await webhooks.process_due(self.sessions, self.payments, clock=self.clock)
            self.pass_time(3_600)
            async with read_only(self.sessions) as session:
                is_waiting = select(StripeEvent.id).where(StripeEvent.processed_at.is_(None))
                if not (await session.scalars(is_waiting.limit(1))).all():
                    return

    async def sweep(self) -> None:
        await payment_sweeps.sweep(self.sessions, self.payments, clock=self.clock)
        await self.process()

    async def open_checkout(
        self, cents: int = 5_000, *, key: str = "", is_card_saved: bool = False
    ) -> Topup:
        async with self.sessions.begin() as session:
            topup = await topups.start(
                session,
                self.organization_id,
                amount_cents=cents,
                idempotency_key=key or new_id("click"),
                clock=self.clock,
            )
        assert topup is not None
        await topups.open_checkout(
            self.sessions,
            self.payments,
            topup.id,
            email="ada@example.com",
            is_card_saved=is_card_saved,
            pages=ReturnPages("http://us/success", "http://us/cancel"),
        )
        return await self.topup(topup.id)

    async def paid(self, cents: int = 5_000, *, is_card_saved: bool = False) -> Topup:
        """A top-up that was paid, and its credit."""
        topup = await self.open_checkout(cents, is_card_saved=is_card_saved)
        assert topup.session_id is not None
        assert self.fake.pay_session(topup.session_id, GOOD) is None
        await topups.converge_checkout(
            self.sessions, self.payments, topup.session_id, clock=self.clock
        )
        paid = await self.topup(topup.id)
        assert paid.state == "paid"
        return paid

    async def topup(self, topup_id: str) -> Topup:
        async with read_only(self.sessions) as session:
            return await session.get_one(Topup, topup_id)

    async def balance(self) -> Balance:
        async with read_only(self.sessions) as session:
            return await ledger.balance(session, self.organization_id)

    async def hold(self, amount: int) -> None:
        """Pretend that running requests hold so much; reconcile would say so."""
        async with self.sessions.begin() as session:
            await session.execute(
                update(BalanceRecord)
                .where(BalanceRecord.organization_id == self.organization_id)
                .values(held_nano_usd=amount)
            )

    async def failed_checks(self) -> list[str]:
        """The books by themselves, and against Stripe."""
        async with read_only(self.sessions) as session:
            checks = await reconcile(session)
        checks.append(await payment_sweeps.compare_with_stripe(self.sessions, self.payments))
        return [f"{check.name}: {check.detail}" for check in checks if not check.is_ok]


@pytest.fixture(scope="session")
def running_stripe() -> Iterator[FakeStripe]:
    fake = FakeStripe()
    fake.start()
    yield fake
    fake.stop()


on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
"""For what depends on locks; the rest of these tests is about Stripe, and runs on SQLite."""


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    names = {"sqlite": "sqlite_url", "postgresql": "postgresql_database_url"}
    url: str = request.getfixturevalue(names[getattr(request, "param", "sqlite")])
    return url


@pytest.fixture
def fake(running_stripe: FakeStripe) -> FakeStripe:
    running_stripe.reset()
    return running_stripe


@pytest.fixture
async def desk(books: Books, fake: FakeStripe) -> AsyncIterator[Desk]:
    payments = Payments(settings_of(fake))
    customer = await books.sign_up("payer@example.com")
    yield Desk(books.sessions, customer.organization.id, payments, fake)
    await payments.close()
