"""The outbox delivers at least once, never within a transaction, and one failure stops nothing."""

from typing import Any

from sqlalchemy import select

from billing.outbox_relay import deliver_due
from common import outbox
from common.db import Sessions, read_only

START_US = 1_000_000_000_000


async def promise(sessions: Sessions, *keys: str, topic: str = "t") -> None:
    async with sessions.begin() as session:
        for key in keys:
            await outbox.promise(
                session, topic=topic, key=key, payload={"key": key}, clock=lambda: START_US
            )


async def messages(sessions: Sessions) -> dict[str, outbox.OutboxMessage]:
    async with read_only(sessions) as session:
        return {m.key: m for m in await session.scalars(select(outbox.OutboxMessage))}


async def test_a_promise_is_kept_once_however_often_it_is_made(sessions: Sessions) -> None:
    seen: list[str] = []

    async def handler(sessions: Sessions, payload: dict[str, Any]) -> None:
        async with sessions.begin() as session:  # no lock is held while a handler works
            await outbox.promise(session, topic="later", key=payload["key"], payload={})
        seen.append(payload["key"])

    await promise(sessions, "a", "b")
    await promise(sessions, "a")
    assert await deliver_due(sessions, {"t": handler}, clock=lambda: START_US) == 2
    assert await deliver_due(sessions, {"t": handler}, clock=lambda: START_US * 2) == 0
    assert sorted(seen) == ["a", "b"]


async def test_a_promise_of_a_transaction_that_fails_was_never_made(sessions: Sessions) -> None:
    async with sessions() as session:
        assert await outbox.promise(session, topic="t", key="a", payload={})
        await session.rollback()
    assert await messages(sessions) == {}


async def test_a_failure_comes_up_again_later_and_stops_no_other(sessions: Sessions) -> None:
    async def handler(sessions: Sessions, payload: dict[str, Any]) -> None:
        if payload["key"] == "bad":
            raise ConnectionError("refused by someone@example.com")

    await promise(sessions, "bad", "good")
    await promise(sessions, "strange", topic="nobody's")
    assert await deliver_due(sessions, {"t": handler}, clock=lambda: START_US) == 1
    stored = await messages(sessions)
    assert stored["good"].done_at is not None
    assert stored["strange"].error == "NoHandler"
    assert (stored["bad"].error, stored["bad"].attempts) == ("ConnectionError", 1)
    first_wait = stored["bad"].next_attempt_at - START_US
    assert await deliver_due(sessions, {"t": handler}, clock=lambda: START_US + 1) == 0
    await deliver_due(sessions, {"t": handler}, clock=lambda: START_US + first_wait)
    second = (await messages(sessions))["bad"]
    assert second.next_attempt_at - (START_US + first_wait) == 2 * first_wait


async def test_what_a_dying_relay_had_claimed_is_delivered_by_another(sessions: Sessions) -> None:
    await promise(sessions, "a")
    async with sessions.begin() as session:
        assert len(await outbox.claim(session, limit=5, clock=lambda: START_US)) == 1
    seen = []

    async def handler(sessions: Sessions, payload: dict[str, Any]) -> None:
        seen.append(payload)

    assert await deliver_due(sessions, {"t": handler}, clock=lambda: START_US) == 0
    later = START_US + outbox.FIRST_RETRY_S * 1_000_000
    assert await deliver_due(sessions, {"t": handler}, clock=lambda: later) == 1
    assert len(seen) == 1


async def test_a_hopeless_message_is_given_up_in_the_end(sessions: Sessions) -> None:
    await promise(sessions, "a", topic="nobody's")
    now = START_US
    for _ in range(outbox.MAX_ATTEMPTS + 5):
        now += 2 * outbox.LONGEST_RETRY_S * 1_000_000
        await deliver_due(sessions, {}, clock=lambda now=now: now)  # type: ignore[misc]
    assert (await messages(sessions))["a"].attempts == outbox.MAX_ATTEMPTS
