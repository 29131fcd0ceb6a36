"""Statements that travel together are one transaction, whatever becomes of them."""

import psycopg
import pytest
from sqlalchemy import bindparam, insert, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from common.db import Base, Sessions, create_engine, create_sessions
from common.outbox import OutboxMessage
from common.round_trip import NOTHING, Call, Statement, begin_late, send_together

TABLE = Base.metadata.tables[OutboxMessage.__tablename__]
ADD = Statement.of(
    insert(TABLE).values(
        {name: bindparam(name) for name in ("id", "topic", "key", "attempts", "created_at")}
        | {"payload": text("'{}'"), "next_attempt_at": bindparam("created_at")}
    )
)
FIND = Statement.of(select(TABLE.c.id).where(TABLE.c.topic == bindparam("topic")))
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
    async with sessions() as session:
        await begin_late(session)
        before, added, nobody, after = await send_together(
            session,
            [
                Call(FIND, [{"topic": "t"}]),
                Call(ADD, [message("a"), message("b"), message("c", "u")]),
                Call(ADD, []),
                Call(FIND, [{"topic": "t"}, {"topic": "u"}, {"topic": "none"}]),
            ],
        )
        await session.commit()
    assert (before.rows, added.rowcount, nobody) == ([], 3, NOTHING)
    assert sorted(after.rows) == [("a",), ("b",), ("c",)]
    assert after.rowcount == 3
    assert await ids(sessions) == {"a", "b", "c"}


async def test_what_was_not_committed_is_gone(sessions: Sessions) -> None:
    async with sessions() as session:
        await begin_late(session)
        await send_together(session, [Call(ADD, [message("a")])])
        await session.execute(text("SELECT 1"))
        await send_together(session, [Call(ADD, [message("b")])])
    assert await ids(sessions) == set()
    async with sessions() as session:  # the connection is as it was
        await send_together(session, [Call(ADD, [message("c")])])
        await session.rollback()
    assert await ids(sessions) == set()


async def test_one_that_fails_takes_all_with_it(sessions: Sessions) -> None:
    async with sessions() as session:
        await begin_late(session)
        calls = [Call(ADD, [message("a")]), Call(ADD, [message("b"), message("a")])]
        with pytest.raises(IntegrityError):
            await send_together(session, [*calls, Call(FIND, [{"topic": "t"}])])
    assert await ids(sessions) == set()
    async with sessions.begin() as session:
        assert len(await send_together(session, calls[:1])) == 1
    assert await ids(sessions) == {"a"}


async def test_a_guarded_update_says_how_many_rows_it_changed(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        rows = [{"b_id": "a", "b_seen": 0}, {"b_id": "a", "b_seen": 0}, {"b_id": "b", "b_seen": 7}]
        calls = [Call(ADD, [message("a"), message("b")]), Call(RAISE, rows)]
        _, raised = await send_together(session, calls)
    assert raised.rowcount == 1


async def test_a_lost_connection_is_given_up(postgresql_database_url: str) -> None:
    engine = create_engine(postgresql_database_url)
    sessions = create_sessions(engine)
    async with sessions() as session:
        await begin_late(session)
        await send_together(session, [Call(ADD, [message("a")])])
        process = await session.scalar(text("SELECT pg_backend_pid()"))
        plain = postgresql_database_url.replace("+psycopg", "")
        async with await psycopg.AsyncConnection.connect(plain, autocommit=True) as other:
            await other.execute("SELECT pg_terminate_backend(%s)", [process])
        with pytest.raises(OperationalError) as lost:
            await send_together(session, [Call(FIND, [{"topic": "t"}])])
    assert lost.value.connection_invalidated
    assert await ids(sessions) == set()
    await engine.dispose()


def test_a_constant_must_be_literal() -> None:
    with pytest.raises(AssertionError, match="constant"):
        Statement.of(select(TABLE.c.id).where(TABLE.c.topic == "t"))
