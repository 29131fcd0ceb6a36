import asyncio

import pytest

from accounts.errors import DisposableEmail, EmailTaken, WeakPassword
from billing import ledger
from billing.money import NANO_PER_DOLLAR
from billing.pricing import InvalidPrice, set_price
from common.db import read_only
from tests.billing.conftest import Books

HUNDRED = 100 * NANO_PER_DOLLAR


async def test_a_new_account_has_its_credit_as_a_ledger_entry(books: Books) -> None:
    account = await books.sign_up("new@example.com", credit=HUNDRED)
    async with read_only(books.sessions) as session:
        balance = await ledger.balance(session, account.organization.id)
        entries = await ledger.entries(session, account.organization.id, 10)
    assert (balance.available, balance.promotional, balance.paid) == (HUNDRED, HUNDRED, 0)
    ((transaction, amount),) = entries
    assert (transaction.kind, amount) == ("signup_grant", HUNDRED)


@pytest.mark.parametrize(
    "spelling", ["B.ob@gmail.com", "bob+again@gmail.com", "BOB@googlemail.com"]
)
async def test_one_inbox_has_one_account_however_it_is_spelt(books: Books, spelling: str) -> None:
    await books.sign_up("bob@gmail.com", credit=HUNDRED)
    with pytest.raises(EmailTaken):
        await books.sign_up(spelling, credit=HUNDRED)


async def test_signing_up_at_the_same_moment_gives_the_credit_once(books: Books) -> None:
    addresses = ["c@gmail.com", "c+1@gmail.com", "c+2@gmail.com", "c+3@gmail.com"]
    results = await asyncio.gather(
        *(books.sign_up(address, credit=HUNDRED) for address in addresses), return_exceptions=True
    )
    assert len([r for r in results if not isinstance(r, BaseException)]) == 1
    assert all(isinstance(r, EmailTaken) for r in results if isinstance(r, BaseException))


async def test_throw_away_addresses_and_weak_passwords_are_refused(books: Books) -> None:
    with pytest.raises(DisposableEmail):
        await books.sign_up("x@mailinator.com")
    from accounts.passwords import require_strong

    with pytest.raises(WeakPassword):
        require_strong("short", email="x@example.com")


async def test_cached_input_may_not_be_priced_above_fresh_input(books: Books) -> None:
    with pytest.raises(InvalidPrice):
        async with books.sessions.begin() as session:
            await set_price(session, "m", input=1, cached=2, output=1)
