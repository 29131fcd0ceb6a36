"""What keeps guessing slow and old answers short-lived."""

import asyncio

import pytest
from redis.asyncio import Redis

from accounts import api_keys, key_format, users
from accounts import sessions as logins
from accounts.errors import (
    BadCredentials,
    InvalidKey,
    KeyRevoked,
    ThrottleUnavailable,
    TooManyAttempts,
)
from accounts.key_cache import KeyCache
from accounts.models import Organization, User
from accounts.passwords import PasswordHasher
from accounts.throttle import Throttle
from common.db import Sessions
from tests.billing.conftest import ACCOUNTS, Books, books

__all__ = ["books"]


class CountedSessions:
    """Sessions that know how often one was opened."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.num_opened = 0

    def __call__(self) -> object:
        self.num_opened += 1
        return self._sessions()


async def test_a_mistyped_key_costs_no_query_and_a_flood_of_one_key_costs_one(
    books: Books,
) -> None:
    counted = CountedSessions(books.sessions)
    cache = KeyCache(counted, books.key_ring)  # type: ignore[arg-type]
    plaintext = books.customer.issued_key.plaintext
    for wrong in (plaintext[:-1] + "0", plaintext[:-1], plaintext + "x", "sk-other", ""):
        with pytest.raises(InvalidKey):
            await cache.authenticate(wrong)
    assert counted.num_opened == 0
    await asyncio.gather(*(cache.authenticate(plaintext) for _ in range(50)))
    assert counted.num_opened == 1
    unknown = key_format.generate()
    for _ in range(10):
        with pytest.raises(InvalidKey):
            await cache.authenticate(unknown)
    assert counted.num_opened == 2


async def test_the_age_of_an_answer_counts_from_before_it_was_asked(books: Books) -> None:
    now_s = 0.0
    cache = KeyCache(books.sessions, books.key_ring, monotonic=lambda: now_s)
    plaintext = books.customer.issued_key.plaintext
    await cache.authenticate(plaintext)
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.revoke(session, books.organization_id, key_id)
    now_s = 0.999
    await cache.authenticate(plaintext)
    now_s = 1.0
    with pytest.raises(KeyRevoked):
        await cache.authenticate(plaintext)


async def test_the_last_use_of_a_key_is_written_and_never_moves_back(books: Books) -> None:
    now_us = 5_000_000
    cache = KeyCache(books.sessions, books.key_ring, clock=lambda: now_us)
    await cache.authenticate(books.customer.issued_key.plaintext)
    await cache.record_last_used()
    async with books.sessions.begin() as session:
        key_id = books.customer.issued_key.key.id
        await api_keys.record_last_used(session, {key_id: 4_000_000})
        (key,) = await api_keys.list_keys(session, books.organization_id)
        assert key.last_used_at == 5_000_000


async def test_without_redis_nobody_gets_to_guess() -> None:
    async with Redis.from_url("redis://127.0.0.1:1/0") as unreachable:
        with pytest.raises(ThrottleUnavailable):
            await Throttle(unreachable, ACCOUNTS).login(address="192.0.2.7", email="a@example.com")


async def test_a_botnet_is_stopped_at_the_account_and_sign_ups_at_the_network(
    clean_redis: str,
) -> None:
    async with Redis.from_url(clean_redis) as redis:
        throttle = Throttle(redis, ACCOUNTS)
        for host in range(ACCOUNTS.login_attempts_per_email):
            await throttle.login(address=f"198.51.100.{host}", email="ada@example.com")
        with pytest.raises(TooManyAttempts):
            await throttle.login(address="203.0.113.1", email="ada@example.com")
        for person in range(ACCOUNTS.signups_per_network):
            await throttle.sign_up(address=f"2001:db8::{person:x}", email=f"p{person}@example.com")
        with pytest.raises(TooManyAttempts) as refused:
            await throttle.sign_up(address="2001:db8::ffff", email="one@example.com")
        assert 0 < refused.value.facts["retry_after_s"] <= ACCOUNTS.signup_window_s
        stored = await redis.keys("*")
        assert stored
        assert not any(b"ada@" in key or b"198.51" in key for key in stored)
        assert all([await redis.ttl(key) > 0 for key in stored])


async def test_an_unknown_user_costs_a_whole_hash_too(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    verify = books.hasher._argon2.verify

    def counting(password: str, password_hash: str) -> bool:
        hashed.append(password_hash)
        return verify(password, password_hash)

    monkeypatch.setattr(books.hasher._argon2, "verify", counting)
    async with books.sessions() as session:
        for email in ("ada@example.com", "nobody@example.com", "no address"):
            with pytest.raises(BadCredentials):
                await users.authenticate(session, email, "wrong password", hasher=books.hasher)
    assert len(hashed) == 3
    assert all(password_hash.startswith("$argon2id$") for password_hash in hashed)


async def test_passwords_are_hashed_as_owasp_asks() -> None:
    hasher = PasswordHasher(type(ACCOUNTS)(api_key_peppers=ACCOUNTS.api_key_peppers))
    assert "$argon2id$v=19$m=19456,t=2,p=1$" in await hasher.hash("a long enough password")
    hasher.close()


async def test_a_disabled_user_and_a_closed_organization_are_out_at_once(books: Books) -> None:
    plaintext = books.customer.issued_key.plaintext
    async with books.sessions.begin() as session:
        started = await logins.start(
            session, books.customer.user, books.organization_id, settings=ACCOUNTS
        )
        (await session.get_one(User, books.customer.user.id)).status = "disabled"
        await session.flush()
        assert await logins.find(session, started.token) is None
        (await session.get_one(Organization, books.organization_id)).status = "closed"
        await session.flush()
        with pytest.raises(InvalidKey):
            await api_keys.authenticate(session, plaintext, books.key_ring)


async def test_a_session_ends_by_itself_and_is_purged(books: Books) -> None:
    async with books.sessions.begin() as session:
        started = await logins.start(
            session, books.customer.user, books.organization_id, settings=ACCOUNTS
        )
        for token in (started.token[:-1], "", "x" * 1_000):
            assert await logins.find(session, token) is None
        assert await logins.find(session, started.token, clock=lambda: started.expires_at) is None
        await logins.purge_expired(session, clock=lambda: started.expires_at - 1)
        assert await logins.find(session, started.token) is not None
        await logins.purge_expired(session, clock=lambda: started.expires_at)
        assert await logins.find(session, started.token) is None
