"""A new password for whoever reads the mail, and for nobody else."""

import asyncio
import io
import re

import pytest
from sqlalchemy import func, select

from accounts import email_tokens, password_reset, users, verification
from accounts import sessions as logins
from accounts.errors import BadCredentials, InvalidEmail, InvalidToken, WeakPassword
from accounts.mail import Mailer
from accounts.models import AuditEvent, EmailToken, Session, User
from billing.outbox_relay import deliver_due
from common.clock import utc_now_us
from common.db import read_only
from common.outbox import OutboxMessage
from tests.billing.conftest import ACCOUNTS, Books, books

__all__ = ["books"]

OLD = "a long enough password"
NEW = "another long password"
EMAIL = "ada@example.com"


async def ask(books: Books, email: str = EMAIL, *, at_s: int = 0) -> None:
    async with books.sessions.begin() as session:
        await password_reset.request(session, email, clock=lambda: at_s * 1_000_000)


async def mails(books: Books) -> str:
    console = io.StringIO()
    mailer = Mailer(ACCOUNTS, console=console)

    async def handler(sessions: object, payload: dict[str, str]) -> None:
        await password_reset.deliver(books.sessions, payload, mailer=mailer, settings=ACCOUNTS)

    await deliver_due(books.sessions, {password_reset.TOPIC: handler})
    return console.getvalue()


async def link(books: Books, *, at_s: int = 0) -> str:
    await ask(books, at_s=at_s)
    (token,) = re.findall(r"/reset\?token=(\S+)", await mails(books))
    return str(token)


async def reset(
    books: Books, token: str, password: str = NEW, *, now_us: int | None = None
) -> None:
    now_us = now_us or utc_now_us()
    async with read_only(books.sessions) as session:
        hashed = await password_reset.hash_new(
            session, token, password, hasher=books.hasher, clock=lambda: now_us
        )
    async with books.sessions.begin() as session:
        await password_reset.reset(session, token, hashed, clock=lambda: now_us)


async def may_log_in(books: Books, password: str) -> bool:
    async with read_only(books.sessions) as session:
        try:
            await users.authenticate(session, EMAIL, password, hasher=books.hasher)
        except BadCredentials:
            return False
    return True


async def test_a_reset_changes_the_password_and_ends_every_session_and_other_link(
    books: Books,
) -> None:
    user = books.customer.user
    async with books.sessions.begin() as session:
        for _ in range(2):
            await logins.start(session, user, books.organization_id, settings=ACCOUNTS)
    first, second = await link(books), await link(books, at_s=1_000)
    assert first != second
    await reset(books, first)
    assert await may_log_in(books, NEW)
    assert not await may_log_in(books, OLD)
    for used in (first, second):
        with pytest.raises(InvalidToken):
            await reset(books, used, "yet another password")
    async with read_only(books.sessions) as session:
        assert await session.scalar(select(func.count()).select_from(Session)) == 0
        events = [*await session.scalars(select(AuditEvent.action))]
    assert "user.reset_password" in events


async def test_of_many_resets_at_once_one_gets_through(books: Books) -> None:
    token = await link(books)
    passwords = [f"a long password, number {number}" for number in range(5)]
    results = await asyncio.gather(
        *(reset(books, token, password) for password in passwords), return_exceptions=True
    )
    assert sum(result is None for result in results) == 1
    assert all(isinstance(result, InvalidToken) for result in results if result is not None)
    assert await may_log_in(books, passwords[results.index(None)])


async def test_an_unknown_address_is_promised_a_mail_as_well_and_none_is_sent(books: Books) -> None:
    await ask(books, "nobody@example.com")
    await ask(books, EMAIL)
    async with read_only(books.sessions) as session:
        promises = [*await session.scalars(select(OutboxMessage))]
    asked = [promise for promise in promises if promise.topic == password_reset.TOPIC]
    assert len(asked) == 2
    assert "nobody" not in str([vars(promise) for promise in asked])
    text = await mails(books)
    assert text.count("/reset?token=") == 1
    assert f"mail to {EMAIL}" in text
    assert "nobody" not in text
    with pytest.raises(InvalidEmail):
        await ask(books, "no address")


async def test_asking_again_and_again_sends_one_mail_to_the_address_of_the_account(
    books: Books,
) -> None:
    for spelling in (EMAIL, "ADA+anything@example.com", EMAIL):
        await ask(books, spelling)
    text = await mails(books)
    assert text.count("mail to ") == text.count(f"mail to {EMAIL}") == 1


async def test_the_link_ends_by_itself_and_fits_nothing_else(books: Books) -> None:
    token = await link(books)
    late = utc_now_us() + ACCOUNTS.email_token_ttl_s * 1_000_000
    with pytest.raises(InvalidToken):
        await reset(books, token, now_us=late)
    for wrong in (token[:-1], "", "x" * 1_000):
        with pytest.raises(InvalidToken):
            await reset(books, wrong)
    async with books.sessions() as session:
        with pytest.raises(InvalidToken):
            await verification.redeem(session, token)
        other = email_tokens.issue(session, books.customer.user, "verify_email", ttl_s=60)
        await session.flush()
        with pytest.raises(InvalidToken):
            await password_reset.reset(session, other, "any hash")
        rows = [*await session.scalars(select(EmailToken))]
        assert token not in str([vars(row) for row in rows])
    await reset(books, token)


async def test_a_weak_password_is_refused_and_the_link_works_on(books: Books) -> None:
    token = await link(books)
    for weak in ("short", EMAIL):
        with pytest.raises(WeakPassword):
            await reset(books, token, weak)
    await reset(books, token)
    assert await may_log_in(books, NEW)


async def test_a_disabled_user_gets_neither_mail_nor_password(books: Books) -> None:
    token = await link(books)
    async with books.sessions.begin() as session:
        (await session.get_one(User, books.customer.user.id)).status = "disabled"
    with pytest.raises(InvalidToken):
        await reset(books, token)
    await ask(books, at_s=1_000)
    assert await mails(books) == ""
