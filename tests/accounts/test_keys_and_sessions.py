import asyncio
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from sqlalchemy import select

from accounts import api_keys, key_format, users
from accounts import sessions as logins
from accounts.api_keys import KeyRing
from accounts.errors import (
    BadCredentials,
    InvalidKey,
    KeyExpired,
    KeyNotFound,
    KeyRevoked,
    ScopeNotAllowed,
    TooManyAttempts,
)
from accounts.key_cache import KeyCache
from accounts.models import ApiKey, Session
from accounts.passwords import PasswordHasher
from accounts.principal import ACCOUNT, INFERENCE, OPERATOR
from accounts.throttle import Throttle, network_of
from tests.billing.conftest import ACCOUNTS, Books, books

__all__ = ["books"]


@pytest.fixture
async def redis(clean_redis: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(clean_redis) as client:
        yield client


async def test_a_key_is_stored_as_a_hash_only(books: Books) -> None:
    plaintext = books.customer.issued_key.plaintext
    async with books.sessions() as session:
        (key,) = (await session.scalars(select(ApiKey))).all()
    stored = " ".join(str(value) for value in vars(key).values())
    assert plaintext not in stored
    assert plaintext[-20:] not in stored
    assert plaintext.startswith("sk_ncompass_")
    assert plaintext not in repr(books.customer)


async def test_the_right_key_opens_and_any_other_does_not(books: Books) -> None:
    plaintext = books.customer.issued_key.plaintext
    async with books.sessions() as session:
        principal = await api_keys.authenticate(session, plaintext, books.key_ring)
        assert principal.organization_id == books.organization_id
        assert not principal.is_operator
        for wrong in (
            plaintext[:-1],
            plaintext.swapcase(),
            "sk_ncompass_",
            "",
            "ü" * 60,
            key_format.generate(),
        ):
            with pytest.raises(InvalidKey):
                await api_keys.authenticate(session, wrong, books.key_ring)
        other_pepper = KeyRing({1: SecretStr("another")})
        with pytest.raises(InvalidKey):
            await api_keys.authenticate(session, plaintext, other_pepper)


async def test_a_revoked_key_is_refused_within_a_second_in_every_process(books: Books) -> None:
    cache = KeyCache(books.sessions, books.key_ring)
    plaintext = books.customer.issued_key.plaintext
    await cache.authenticate(plaintext)
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)
    await asyncio.sleep(1.05)
    with pytest.raises(KeyRevoked):
        await cache.authenticate(plaintext)


async def test_a_key_in_use_is_asked_for_again_before_anybody_waits_for_it(books: Books) -> None:
    now_s = [100.0]
    cache = KeyCache(books.sessions, books.key_ring, monotonic=lambda: now_s[0])
    plaintext = books.customer.issued_key.plaintext
    await cache.authenticate(plaintext)
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)
    now_s[0] += 0.5
    await cache.authenticate(plaintext)
    assert not cache._asking
    now_s[0] += 0.2
    await cache.authenticate(plaintext)  # what is known still holds
    await asyncio.gather(*cache._asking.values())
    with pytest.raises(KeyRevoked):
        await cache.authenticate(plaintext)


async def test_an_answer_that_nobody_waited_for_may_fail(books: Books) -> None:
    now_s = [100.0]
    cache = KeyCache(books.sessions, books.key_ring, monotonic=lambda: now_s[0])
    plaintext = books.customer.issued_key.plaintext
    await cache.authenticate(plaintext)
    now_s[0] += 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_keys, "authenticate", None)
        await cache.authenticate(plaintext)
        await asyncio.wait(cache._asking.values())
        now_s[0] += 0.4
        with pytest.raises(TypeError):
            await cache.authenticate(plaintext)
    await cache.authenticate(plaintext)


async def test_nobody_revokes_the_key_of_another(books: Books) -> None:
    other = await books.sign_up("eve@example.com")
    async with books.sessions.begin() as session:
        with pytest.raises(KeyNotFound):
            await api_keys.revoke(session, other.organization.id, books.customer.issued_key.key.id)


async def test_nobody_grants_more_than_they_hold(books: Books) -> None:
    async with books.sessions.begin() as session:
        principal = await api_keys.authenticate(
            session, books.customer.issued_key.plaintext, books.key_ring
        )
        for scopes in ((OPERATOR,), (INFERENCE, ACCOUNT, OPERATOR), ()):
            with pytest.raises(ScopeNotAllowed):
                await api_keys.issue(
                    session,
                    principal,
                    name="more",
                    scopes=scopes,
                    created_by=None,
                    key_ring=books.key_ring,
                )


async def test_an_expired_key_is_refused(books: Books) -> None:
    async with books.sessions.begin() as session:
        issued = await api_keys.issue(
            session,
            books.organization_id,
            name="short",
            scopes=(INFERENCE,),
            created_by=None,
            key_ring=books.key_ring,
            expires_at=1,
        )
    async with books.sessions() as session:
        with pytest.raises(KeyExpired):
            await api_keys.authenticate(session, issued.plaintext, books.key_ring)


async def test_a_password_is_checked_and_an_unknown_user_learns_nothing(books: Books) -> None:
    async with books.sessions() as session:
        hasher: PasswordHasher = books.hasher
        user = await users.authenticate(
            session, "ADA@example.com", "a long enough password", hasher=hasher
        )
        assert user.password_hash.startswith("$argon2id$")
        messages = set()
        for email, password in (
            ("ada@example.com", "wrong password!"),
            ("no@example.com", "x" * 12),
        ):
            with pytest.raises(BadCredentials) as refused:
                await users.authenticate(session, email, password, hasher=hasher)
            messages.add(refused.value.message)
        assert len(messages) == 1


async def test_a_session_is_known_by_its_token_alone_until_it_ends(books: Books) -> None:
    async with books.sessions.begin() as session:
        started = await logins.start(
            session, books.customer.user, books.organization_id, settings=ACCOUNTS
        )
    async with books.sessions.begin() as session:
        (row,) = (await session.scalars(select(Session))).all()
        assert started.token not in str(vars(row))
        found = await logins.find(session, started.token)
        assert found is not None
        assert found.principal.organization_id == books.organization_id
        assert await logins.find(session, started.token + "x") is None
        await logins.end(session, started.token)
        assert await logins.find(session, started.token) is None


async def test_logins_are_throttled_by_network_and_inbox_and_others_are_not(redis: Redis) -> None:
    throttle = Throttle(redis, ACCOUNTS)
    for _ in range(ACCOUNTS.login_attempts_per_email_and_network):
        await throttle.login(address="192.0.2.7", email="ada@example.com")
    with pytest.raises(TooManyAttempts) as refused:
        await throttle.login(address="192.0.2.7", email="Ada@example.com")
    assert refused.value.facts["retry_after_s"] > 0
    await throttle.login(address="198.51.100.1", email="ada@example.com")


@pytest.mark.parametrize(
    ("address", "network"),
    [("192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64")],
)
def test_an_ipv6_customer_is_a_whole_network(address: str, network: str) -> None:
    assert network_of(address) == network
