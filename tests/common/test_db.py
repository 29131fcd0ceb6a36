import time
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from common import db
from common.db import Sessions, database_now_us, read_only


async def test_the_database_clock_tells_utc_microseconds(sessions: Sessions) -> None:
    async with sessions() as session:
        now_us = (await session.execute(select(database_now_us()))).scalar_one()
    assert abs(now_us - time.time_ns() // 1000) < 2_000_000


async def test_reading_does_not_wait_for_a_writer(sessions: Sessions) -> None:
    async with sessions() as writer:
        await writer.execute(select(1))  # holds SQLite's write lock
        async with read_only(sessions) as reader:
            assert (await reader.execute(select(1))).scalar_one() == 1


async def test_a_connection_that_was_lost_while_it_rested_is_replaced(
    postgresql_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "TRUSTED_FOR_S", 0.0)
    engine = db.create_engine(postgresql_database_url)
    async with engine.connect() as resting:
        process = (await resting.execute(select(func.pg_backend_pid()))).scalar_one()
    other = db.create_engine(postgresql_database_url)
    async with other.connect() as connection:
        await connection.execute(select(func.pg_terminate_backend(process)))
    async with engine.connect() as connection:
        assert (await connection.execute(select(func.pg_backend_pid()))).scalar_one() != process
    await engine.dispose()
    await other.dispose()


async def test_a_statement_is_one_visit_to_sqlites_thread(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = []
    execute = aiosqlite.Connection._execute

    async def count(self: aiosqlite.Connection, work: Any, *arguments: Any) -> Any:
        visits.append(work)
        return await execute(self, work, *arguments)

    engine = db.create_engine(sqlite_url)
    async with engine.connect() as connection:
        monkeypatch.setattr(aiosqlite.Connection, "_execute", count)
        await connection.execute(select(1))
        assert len(visits) == 2  # BEGIN too
        await connection.commit()
        assert len(visits) == 3
    assert len(visits) == 3
    await engine.dispose()


async def test_after_a_commit_that_failed_sqlite_goes_on(sqlite_url: str) -> None:
    engine = db.create_engine(sqlite_url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        await connection.exec_driver_sql(
            "CREATE TABLE children (id INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
        )
    with pytest.raises(IntegrityError):
        async with engine.begin() as connection:
            await connection.exec_driver_sql("INSERT INTO children VALUES (1)")
    async with engine.begin() as connection:
        count = await connection.exec_driver_sql("SELECT count(*) FROM children")
        assert count.scalar_one() == 0
    await engine.dispose()
