"""Statements that travel together are one transaction, whatever becomes of them."""

import asyncio
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy import bindparam, insert, select, text, update
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from common.db import Base, Sessions, create_engine, create_sessions
from common.outbox import OutboxMessage
from common.round_trip import (
    NOTHING,
    Call,
    RowMissed,
    Statement,
    beginning_late,
    commit_together,
    send_together,
)

TABLE = Base.metadata.tables[OutboxMessage.__tablename__]
ADD = Statement.of(
    insert(TABLE).values(
        {name: bindparam(name) for name in ("id", "topic", "key", "attempts", "created_at")}
        | {"payload": text("'{}'"), "next_attempt_at": bindparam("created_at")}
    )
)
FIND = Statement.of(select(TABLE.c.id).where(TABLE.c.topic == bindparam("topic")))
SLEEP = Statement.of(select(text("pg_sleep(5)")))
RAISE = Statement.of(
    update(TABLE)
    .where(TABLE.c.id == bindparam("b_id"), TABLE.c.attempts == bindparam("b_seen"))
    .values(attempts=TABLE.c.attempts + text("1"))
)


def message(name: str, topic: str = "t") -> dict[str, object]:
    return {"id": name, "topic": topic, "key": name, "attempts": 0, "created_at": 0}


async def ids(sessions: Sessions) -> set[str]:
    async with sessions() as session:
        return set(await session.scalars(select(OutboxMessage.id)))


async def test_each_sees_what_those_before_it_did(sessions: Sessions) -> None:
    async with beginning_late(sessions).begin() as connection:
        before, added, nobody, after = await send_together(
            connection,
            [
                Call(FIND, [{"topic": "t"}]),
                Call(ADD, [message("a"), message("b"), message("c", "u")]),
                Call(ADD, []),
                Call(FIND, [{"topic": "t"}, {"topic": "u"}, {"topic": "none"}]),
            ],
        )
    assert (before.rows, added.rowcount, nobody) == ([], 3, NOTHING)
    assert sorted(after.rows) == [("a",), ("b",), ("c",)]
    assert after.rowcount == 3
    assert await ids(sessions) == {"a", "b", "c"}


async def test_what_was_not_committed_is_gone(sessions: Sessions) -> None:
    async with beginning_late(sessions).connect() as connection:
        await connection.begin()
        await send_together(connection, [Call(ADD, [message("a")])])
        await connection.execute(text("SELECT 1"))
        await send_together(connection, [Call(ADD, [message("b")])])
    assert await ids(sessions) == set()
    async with sessions() as session:  # the connection is as it was
        await send_together(await session.connection(), [Call(ADD, [message("c")])])
    assert await ids(sessions) == set()


async def test_one_that_fails_takes_all_with_it(sessions: Sessions) -> None:
    calls = [Call(ADD, [message("a")]), Call(ADD, [message("b"), message("a")])]
    with pytest.raises(IntegrityError):
        async with beginning_late(sessions).begin() as connection:
            await send_together(connection, [*calls, Call(FIND, [{"topic": "t"}])])
    assert await ids(sessions) == set()
    async with sessions.begin() as session:
        assert len(await send_together(await session.connection(), calls[:1])) == 1
    assert await ids(sessions) == {"a"}


async def test_a_guarded_update_says_how_many_rows_it_changed(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        rows = [{"b_id": "a", "b_seen": 0}, {"b_id": "a", "b_seen": 0}, {"b_id": "b", "b_seen": 7}]
        calls = [Call(ADD, [message("a"), message("b")]), Call(RAISE, rows)]
        _, raised = await send_together(await session.connection(), calls)
    assert raised.rowcount == 1


async def test_the_last_ones_leave_with_the_commit(sessions: Sessions) -> None:
    rows = [{"b_id": "a", "b_seen": 0}, {"b_id": "a", "b_seen": 1}]
    async with beginning_late(sessions).begin() as connection:
        await send_together(connection, [Call(ADD, [message("a")])])
        await commit_together(connection, [Call(ADD, [message("b")]), Call(RAISE, rows)])
    assert await ids(sessions) == {"a", "b"}
    async with beginning_late(sessions).begin() as connection:
        await commit_together(connection, [Call(ADD, []), Call(RAISE, [])])


async def test_an_update_that_misses_its_row_commits_nothing(sessions: Sessions) -> None:
    hit, missed = {"b_id": "a", "b_seen": 0}, {"b_id": "a", "b_seen": 7}
    for rows in ([missed], [hit, missed], [missed, hit]):
        calls = [Call(ADD, [message("a"), message("b")]), Call(RAISE, rows), Call(ADD, [])]
        with pytest.raises(RowMissed):
            async with beginning_late(sessions).begin() as connection:
                await commit_together(connection, calls)
        assert await ids(sessions) == set()


async def test_one_that_fails_is_not_committed_around(sessions: Sessions) -> None:
    with pytest.raises(IntegrityError):
        async with beginning_late(sessions).begin() as connection:
            await commit_together(
                connection, [Call(ADD, [message("a"), message("b"), message("a")])]
            )
    assert await ids(sessions) == set()


async def test_a_lost_connection_is_given_up(postgresql_database_url: str) -> None:
    engine = create_engine(postgresql_database_url)
    sessions = create_sessions(engine)
    async with beginning_late(sessions).connect() as connection:
        await connection.begin()
        await send_together(connection, [Call(ADD, [message("a")])])
        process = await connection.scalar(text("SELECT pg_backend_pid()"))
        plain = postgresql_database_url.replace("+psycopg", "")
        async with await psycopg.AsyncConnection.connect(plain, autocommit=True) as other:
            await other.execute("SELECT pg_terminate_backend(%s)", [process])
        with pytest.raises(OperationalError) as lost:
            await send_together(connection, [Call(FIND, [{"topic": "t"}])])
    assert lost.value.connection_invalidated
    assert await ids(sessions) == set()
    await engine.dispose()


async def test_one_that_was_interrupted_ends_its_connection(postgresql_database_url: str) -> None:
    engine = create_engine(postgresql_database_url)
    sessions = create_sessions(engine)
    calls = [Call(ADD, [message("a")]), Call(SLEEP)]
    async with beginning_late(sessions).connect() as connection:
        await connection.begin()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await send_together(connection, calls)
    async with beginning_late(sessions).begin() as connection:
        (found,) = await send_together(connection, [Call(FIND, [{"topic": "t"}])])
    assert found.rows == []
    await engine.dispose()


async def test_a_string_that_the_database_cannot_keep_is_refused_whole(
    postgresql_database_url: str,
) -> None:
    engine = create_engine(postgresql_database_url)
    sessions = create_sessions(engine)
    with pytest.raises(DataError):
        async with beginning_late(sessions).begin() as connection:
            await send_together(connection, [Call(ADD, [message("nul\0byte")])])
    assert await ids(sessions) == set()
    await engine.dispose()


async def test_a_statement_is_prepared_once_whatever_fails(postgresql_database_url: str) -> None:
    engine = create_engine(postgresql_database_url)
    sessions = create_sessions(engine)
    for name in ("a", "a", "b"):
        with suppress(IntegrityError):
            async with beginning_late(sessions).begin() as connection:
                await send_together(
                    connection, [Call(ADD, [message(name)]), Call(FIND, [{"topic": "t"}])]
                )
    async with engine.connect() as connection:
        found = await connection.scalars(text("SELECT statement FROM pg_prepared_statements"))
        prepared = found.all()
    assert len(prepared) == len(set(prepared)) == 3  # BEGIN, too
    assert await ids(sessions) == {"a", "b"}
    await engine.dispose()


def test_a_constant_must_be_literal() -> None:
    with pytest.raises(AssertionError, match="constant"):
        Statement.of(select(TABLE.c.id).where(TABLE.c.topic == "t"))
