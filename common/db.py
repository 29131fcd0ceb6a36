"""The database: declarative base, column types, and sessions for SQLite and PostgreSQL.

Domain functions take an `AsyncSession` first and never commit; the route or task that opened the
transaction owns it. SQLite runs in WAL mode and every transaction starts with `BEGIN IMMEDIATE`:
a deferred transaction that reads and then writes fails with "database is locked" whatever the
busy timeout is (435 of 480 were lost when measured).
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, MetaData, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.sql.compiler import SQLCompiler

from common.sqlite import QuickSqlite

SQLITE_BUSY_TIMEOUT_MS = 10_000
BEGINS_LATE = "begins_late"
"""An execution option: `common.round_trip` begins the transaction, with its first statements."""
TRUSTED_FOR_S = 1.0
"""A connection that was used so lately is taken for alive."""

Sessions = async_sessionmaker[AsyncSession]


class Base(DeclarativeBase):
    """Every table of the platform. Timestamps are `BigInteger` UTC microseconds, money is int."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class database_now_us(ColumnElement[int]):  # noqa: N801 - used like an SQL function
    """The database's own clock in UTC microseconds. Leases compare against nothing else."""

    type = BigInteger()
    inherit_cache = True


@compiles(database_now_us, "sqlite")
def _sqlite_now(element: database_now_us, compiler: SQLCompiler, **kwargs: Any) -> str:
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
    )


@compiles(database_now_us, "postgresql")
def _postgresql_now(element: database_now_us, compiler: SQLCompiler, **kwargs: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"


def create_engine(database_url: str) -> AsyncEngine:
    """An engine for `sqlite+aiosqlite:///…` or `postgresql+psycopg://…`."""
    # NOTE: hide_parameters, because a database error in a log must not carry e-mail addresses.
    if not database_url.startswith("sqlite"):
        engine = create_async_engine(
            database_url,
            pool_size=16,
            max_overflow=16,
            # The one that was used last: its server process has the statements and pages at hand.
            pool_use_lifo=True,
            hide_parameters=True,
            # What is worth preparing is prepared by `common.pipeline`.
            connect_args={"prepare_threshold": None, "client_encoding": "utf8"},
        )
        _ask_whether_alive(engine)
        return engine
    engine = create_async_engine(database_url, module=QuickSqlite(), hide_parameters=True)

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        options = connection.get_execution_options()
        if options.get(BEGINS_LATE):
            return
        if options.get("read_only"):
            connection.exec_driver_sql("BEGIN")
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _ask_whether_alive(engine: AsyncEngine) -> None:
    """Ping a connection that has rested before it is used, as `pool_pre_ping` does each time.

    One that was just used is as alive as a ping could tell, and a hold is a round trip shorter.
    """
    dialect = engine.sync_engine.dialect

    @event.listens_for(engine.sync_engine, "checkin")
    def _note_use(connection: Any, record: Any) -> None:
        record.info["used_at_s"] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _ping(connection: Any, record: Any, proxy: Any) -> None:
        is_rested = time.monotonic() - record.info.get("used_at_s", 0.0) > TRUSTED_FOR_S
        if is_rested and not dialect._do_ping_w_event(connection):
            raise DisconnectionError("the connection was lost while nobody used it")


def create_sessions(engine: AsyncEngine) -> Sessions:
    """A session factory whose objects stay readable after commit."""
    return async_sessionmaker(engine, expire_on_commit=False)


@asynccontextmanager
async def read_only(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """A session for reading: takes no write lock on SQLite, and is rolled back at the end.

    What was loaded stays readable afterwards.
    """
    async with sessions() as session:
        await session.connection(execution_options={"read_only": True})
        yield session
        session.expunge_all()
        await session.rollback()
