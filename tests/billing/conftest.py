"""An organization with a little credit and a price: nearly empty is the normal case."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from pydantic import SecretStr

from accounts.api_keys import KeyRing
from accounts.passwords import PasswordHasher
from accounts.settings import AccountsSettings
from billing import pricing
from billing.hold_operations import AdmitHold, Hold, SettleHold
from billing.holds import HoldWriter
from billing.money import NANO_PER_DOLLAR
from billing.settings import BillingSettings
from billing.signup import SignedUp, sign_up
from common.db import Sessions
from common.ids import new_id

MODEL = "owner/model"
INPUT, CACHED, OUTPUT = 2 * NANO_PER_DOLLAR, NANO_PER_DOLLAR // 2, 6 * NANO_PER_DOLLAR
"""Per million tokens: 2000, 500 and 6000 nano-dollars a token."""
ACCOUNTS = AccountsSettings(
    api_key_peppers={1: SecretStr("pepper of the tests")},
    argon2_memory_kib=64,
    argon2_iterations=1,
)


@dataclass
class Books:
    """The tables of one test, and the customer that it is about."""

    sessions: Sessions
    customer: SignedUp
    price_id: str
    key_ring: KeyRing
    hasher: PasswordHasher

    @property
    def organization_id(self) -> str:
        return self.customer.organization.id

    def admit(self, output: int = 10, prompt: int = 100, **changes: object) -> AdmitHold:
        values = {
            "request_id": new_id("req"),
            "organization_id": self.organization_id,
            "api_key_id": self.customer.issued_key.key.id,
            "model": MODEL,
            "price_id": self.price_id,
            "gateway": "gw_test",
            "input_tokens": prompt,
            "output_tokens": output,
        }
        return AdmitHold(**(values | changes))  # type: ignore[arg-type]

    async def sign_up(self, email: str, credit: int = 0) -> SignedUp:
        async with self.sessions.begin() as session:
            return await sign_up(
                session,
                email=email,
                password="a long enough password",
                hasher=self.hasher,
                key_ring=self.key_ring,
                accounts_settings=ACCOUNTS,
                billing_settings=BillingSettings(signup_credit_nano_usd=credit),
            )


def settle_of(hold: Hold, uncached: int = 100, cached: int = 0, output: int = 10) -> SettleHold:
    return SettleHold(hold.request_id, hold.epoch, uncached, cached, output, "completed")


@pytest.fixture
async def books(sessions: Sessions) -> AsyncIterator[Books]:
    hasher = PasswordHasher(ACCOUNTS)
    key_ring = KeyRing(ACCOUNTS.api_key_peppers)
    async with sessions.begin() as session:
        price = await pricing.set_price(session, MODEL, input=INPUT, cached=CACHED, output=OUTPUT)
    made = Books(sessions, None, price.id, key_ring, hasher)  # type: ignore[arg-type]
    made.customer = await made.sign_up("ada@example.com", credit=NANO_PER_DOLLAR)
    yield made
    hasher.close()


@pytest.fixture
async def writer(sessions: Sessions) -> AsyncIterator[HoldWriter]:
    running = HoldWriter(sessions)
    await running.start()
    yield running
    await running.stop()
