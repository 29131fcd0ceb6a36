"""The mail that proves an address, and the credit that comes with the proof."""

import asyncio
import io
import re

import pytest
from sqlalchemy import select

from accounts import verification
from accounts.errors import InvalidToken
from accounts.mail import Mailer
from accounts.models import EmailToken, User
from billing import ledger, signup
from billing.money import NANO_PER_DOLLAR
from billing.outbox_relay import deliver_due
from billing.settings import BillingSettings
from billing.signup import SignedUp
from common.db import read_only
from common.outbox import OutboxMessage
from tests.billing.conftest import ACCOUNTS, Books, books

__all__ = ["books"]

BILLING = BillingSettings()
HUNDRED = 100 * NANO_PER_DOLLAR
VERIFYING = ACCOUNTS.model_copy(update={"is_email_verification_on": True})


async def sign_up(books: Books, email: str = "new@example.com") -> SignedUp:
    async with books.sessions.begin() as session:
        return await signup.sign_up(
            session,
            email=email,
            password="a long enough password",
            hasher=books.hasher,
            key_ring=books.key_ring,
            accounts_settings=VERIFYING,
            billing_settings=BILLING,
        )


async def tokens_mailed(books: Books) -> list[str]:
    console = io.StringIO()
    mailer = Mailer(VERIFYING, console=console)

    async def handler(sessions: object, payload: dict[str, str]) -> None:
        await verification.deliver(books.sessions, payload, mailer=mailer, settings=VERIFYING)

    await deliver_due(books.sessions, {verification.TOPIC: handler})
    return re.findall(r"/verify\?token=(\S+)", console.getvalue())


async def balance_of(books: Books, account: SignedUp) -> int:
    async with read_only(books.sessions) as session:
        return (await ledger.balance(session, account.organization.id)).available


async def test_the_credit_comes_with_the_verified_address_and_once(books: Books) -> None:
    account = await sign_up(books)
    assert account.granted_nano_usd == 0
    assert await balance_of(books, account) == 0
    (token,) = await tokens_mailed(books)

    async def verify() -> int:
        async with books.sessions.begin() as session:
            return await signup.verify_email(session, token, settings=BILLING)

    results = await asyncio.gather(*(verify() for _ in range(5)), return_exceptions=True)
    assert results.count(HUNDRED) == 1
    assert all(isinstance(r, InvalidToken) for r in results if r != HUNDRED)
    assert await balance_of(books, account) == HUNDRED
    async with read_only(books.sessions) as session:
        assert (await session.get_one(User, account.user.id)).email_verified_at is not None


async def test_the_token_is_in_the_mail_and_nowhere_else(books: Books) -> None:
    await sign_up(books)
    (token,) = await tokens_mailed(books)
    async with read_only(books.sessions) as session:
        rows = [*await session.scalars(select(EmailToken))]
        promises = [*await session.scalars(select(OutboxMessage))]
    assert token not in str([vars(row) for row in rows])
    assert token not in str([vars(promise) for promise in promises])


async def test_a_token_is_for_one_address_and_for_a_time(books: Books) -> None:
    account = await sign_up(books)
    (token,) = await tokens_mailed(books)
    async with books.sessions.begin() as session:
        user = await session.get_one(User, account.user.id)
        user.email = "elsewhere@example.com"
    async with books.sessions() as session:
        for wrong in (token, token[:-1], "", "x" * 1_000):
            with pytest.raises(InvalidToken):
                await verification.redeem(session, wrong)
            await session.rollback()
        user = await session.get_one(User, account.user.id)
        user.email = account.user.email
        await session.flush()
        late = 10**18
        with pytest.raises(InvalidToken):
            await verification.redeem(session, token, clock=lambda: late)
        assert (await verification.redeem(session, token)).id == account.user.id


async def test_asking_again_and_again_sends_one_mail(books: Books) -> None:
    account = await sign_up(books)
    now = 1_000_000_000_000
    async with books.sessions.begin() as session:
        asked = [
            await verification.request(session, account.user, clock=lambda: now) for _ in range(5)
        ]
    assert asked == [True, False, False, False, False]


def test_a_line_break_cannot_smuggle_a_header_into_a_mail() -> None:
    mailer = Mailer(ACCOUNTS, console=io.StringIO())
    with pytest.raises(ValueError, match="linefeed"):
        asyncio.run(mailer.send(to="a@example.com\nBcc: b@example.com", subject="s", body="b"))
