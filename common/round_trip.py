"""Statements that travel together: one round trip on PostgreSQL, one visit to SQLite's thread.

SQLAlchemy sends a statement and waits for its answer before it sends the next; in a hold's eight
statements most of the time was such waiting, and the way through the ORM's layers. Here statements
are compiled once, and those that need not wait for one another leave at once (psycopg's pipeline).
Nothing else changes: each is executed by itself and in order, sees what was committed before it
began, and takes its locks as it would alone.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import ClauseElement, Dialect, Select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from common.db import BEGINS_LATE
from common.sqlite import visit

Row = tuple[Any, ...]
Parameters = Mapping[str, Any]
_DIALECTS: dict[str, Dialect] = {
    "postgresql": PGDialect_psycopg(),  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    "sqlite": SQLiteDialect_aiosqlite(paramstyle="named"),
}


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of Core, compiled once for each database. Its values are strings and integers.

    What it says itself must be literal: a constant that travels as a value hides from PostgreSQL that
    an index which has only such rows will do.
    """

    texts: Mapping[str, str]
    is_query: bool

    @classmethod
    def of(cls, construct: ClauseElement) -> "Statement":
        """One that both databases understand."""
        return cls.by_dialect(lambda dialect: construct)

    @classmethod
    def by_dialect(cls, build: Callable[[str], ClauseElement]) -> "Statement":
        """One that `build` makes for `postgresql` and for `sqlite`."""
        compiled = {name: build(name).compile(dialect=made) for name, made in _DIALECTS.items()}
        for one in compiled.values():
            assert all(value is None for value in one.params.values()), f"a constant in {one}"
        is_query = isinstance(compiled["sqlite"].statement, Select)
        return cls({name: str(one) for name, one in compiled.items()}, is_query)


@dataclass(frozen=True, slots=True)
class Call:
    """A statement and what it is executed with, once for each of `rows`."""

    statement: Statement
    rows: Sequence[Parameters] = field(default=({},))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: what was found, and how many rows were found or changed."""

    rows: list[Row]
    rowcount: int


NOTHING = Answer([], 0)


async def begin_late(session: AsyncSession) -> None:
    """Let the transaction of a new session begin with what is first sent together.

    Until then there is none: a statement that is executed in any other way is committed by itself.
    """
    options: dict[str, Any] = {BEGINS_LATE: True}
    if session.get_bind().dialect.name == "postgresql":
        options["isolation_level"] = "AUTOCOMMIT"  # of the driver, which sends no BEGIN then
    await session.connection(execution_options=options)


async def send_together(session: AsyncSession, calls: Sequence[Call]) -> list[Answer]:
    """Execute `calls` in order and return what each came to; raises SQLAlchemy's DBAPIError.

    When one fails, those after it are not executed, and the transaction can only be rolled back.
    """
    if not any(call.rows for call in calls):
        return [NOTHING for _ in calls]
    connection = await session.connection()
    driver: Any = (await connection.get_raw_connection()).driver_connection
    try:
        if isinstance(driver, psycopg.AsyncConnection):
            return await _send_to_postgresql(driver, calls)
        return await visit(driver, _run_on_sqlite, calls)
    except (psycopg.Error, sqlite3.Error) as error:
        raise await _translated(connection, error) from error


async def _send_to_postgresql(
    driver: psycopg.AsyncConnection[Row], calls: Sequence[Call]
) -> list[Answer]:
    is_new = driver.autocommit and driver.info.transaction_status == TransactionStatus.IDLE
    async with driver.pipeline():
        if is_new:
            await driver.execute("BEGIN")
        cursors = [await _execute(driver, call) if call.rows else None for call in calls]
    return [await _answer(cursor, call) for cursor, call in zip(cursors, calls, strict=True)]


async def _execute(driver: psycopg.AsyncConnection[Row], call: Call) -> psycopg.AsyncCursor[Row]:
    cursor = driver.cursor()
    text = call.statement.texts["postgresql"]
    if len(call.rows) == 1:
        await cursor.execute(text, call.rows[0])
    else:
        # Half the work of as many `execute`, though what is found is waited for.
        await cursor.executemany(text, call.rows, returning=call.statement.is_query)
    return cursor


async def _answer(cursor: psycopg.AsyncCursor[Row] | None, call: Call) -> Answer:
    if cursor is None:
        return NOTHING
    if not call.statement.is_query:
        return Answer([], cursor.rowcount)
    rows = [row async for found in cursor.results() for row in await found.fetchall()]
    return Answer(rows, len(rows))


def _run_on_sqlite(raw: sqlite3.Connection, calls: Sequence[Call]) -> list[Answer]:
    """In the connection's thread."""
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")
    answers = []
    for call in calls:
        rows: list[Row] = []
        changed = 0
        for parameters in call.rows:
            cursor = raw.execute(call.statement.texts["sqlite"], parameters)
            rows += cursor.fetchall()
            changed += cursor.rowcount
        answers.append(Answer(rows, len(rows) if call.statement.is_query else changed))
    return answers


async def _translated(
    connection: AsyncConnection, error: psycopg.Error | sqlite3.Error
) -> BaseException:
    """The same error as SQLAlchemy would raise it; a connection that is lost is given up."""
    dialect = connection.dialect
    raw = await connection.get_raw_connection()
    is_lost = dialect.is_disconnect(error, raw.dbapi_connection, None)  # type: ignore[arg-type]
    if is_lost:
        await connection.invalidate(error)
    return DBAPIError.instance(
        None,
        None,
        error,
        psycopg.Error if isinstance(error, psycopg.Error) else sqlite3.Error,
        hide_parameters=True,
        connection_invalidated=is_lost,
        dialect=dialect,
    )
