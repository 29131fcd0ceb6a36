"""Statements that travel together: one round trip on PostgreSQL, one visit to SQLite's thread.

SQLAlchemy sends a statement and waits for its answer before it sends the next; in a hold's eight
statements most of the time was such waiting, and the way through the ORM's layers. Here statements
are compiled once, and those that need not wait for one another leave at once (`common.pipeline`).
Nothing else changes: each is executed by itself and in order, sees what was committed before it
began, and takes its locks as it would alone.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import ClauseElement, Select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.compiler import SQLCompiler

from common import pipeline
from common.db import BEGINS_LATE, Sessions
from common.sqlite import visit

Row = tuple[Any, ...]
Parameters = Mapping[str, Any]
_SQLITE = SQLiteDialect_aiosqlite(paramstyle="named")
_POSTGRESQL = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]  # theirs
BEGIN = b"BEGIN"
PREPARED = "prepared"
"""Where a connection of the pool keeps what `common.pipeline` has prepared on it."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of Core, compiled once for each database. Its values are strings and integers.

    What it says itself must be literal: a constant that travels as a value hides from PostgreSQL that
    an index which has only such rows will do.
    """

    named: str
    """As SQLite takes it, with `:name` for each value."""
    numbered: tuple[bytes, tuple[str, ...]]
    """As PostgreSQL takes it, with `$1`, and the names of its values in their order."""
    is_query: bool

    @classmethod
    def of(cls, construct: ClauseElement) -> "Statement":
        """One that both databases understand."""
        return cls.by_dialect(lambda dialect: construct)

    @classmethod
    def by_dialect(cls, build: Callable[[str], ClauseElement]) -> "Statement":
        """One that `build` makes for `postgresql` and for `sqlite`."""
        named = build("sqlite").compile(dialect=_SQLITE)
        numbered = build("postgresql").compile(dialect=_POSTGRESQL)
        assert isinstance(numbered, SQLCompiler)
        assert numbered.positiontup is not None
        assert not any(numbered.params.values()), f"a constant in {numbered}"
        return cls(
            str(named),
            (str(numbered).encode(), tuple(numbered.positiontup)),
            isinstance(named.statement, Select),
        )


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


def beginning_late(sessions: Sessions) -> AsyncEngine:
    """The engine of `sessions`, but a transaction begins with what is first sent together.

    For `async with beginning_late(sessions).begin() as connection`, without a session: what the ORM
    does for each transaction takes longer than a hold.
    """
    engine: AsyncEngine = sessions.kw["bind"]
    return engine.execution_options(**{BEGINS_LATE: True})


async def send_together(connection: AsyncConnection, calls: Sequence[Call]) -> list[Answer]:
    """Execute `calls` in order and return what each came to; raises SQLAlchemy's DBAPIError.

    When one fails, those after it are not executed, and the transaction can only be rolled back.
    """
    if not any(call.rows for call in calls):
        return [NOTHING for _ in calls]
    assert connection.sync_connection is not None
    raw = connection.sync_connection.connection
    driver: Any = raw.driver_connection
    try:
        if isinstance(driver, psycopg.AsyncConnection):
            prepared = raw.info.setdefault(PREPARED, {})  # ends with the connection
            return await _run_on_postgresql(driver, prepared, calls)
        return await visit(driver, _run_on_sqlite, calls)
    except (psycopg.Error, sqlite3.Error) as error:
        raise await _translated(connection, error) from error
    except asyncio.CancelledError:
        await connection.invalidate()  # nobody knows how far it has come
        raise


async def _run_on_postgresql(
    driver: psycopg.AsyncConnection[Any], prepared: dict[bytes, bytes], calls: Sequence[Call]
) -> list[Answer]:
    is_new = driver.info.transaction_status == TransactionStatus.IDLE
    commands: list[pipeline.Command] = [(BEGIN, ())] if is_new else []
    for call in calls:
        text, names = call.statement.numbered
        commands += [(text, [row[name] for name in names]) for row in call.rows]
    results = iter((await pipeline.run(driver, prepared, commands))[is_new:])
    answers = []
    for call in calls:
        of_call = list(islice(results, len(call.rows)))
        if call.statement.is_query:
            rows = [row for result in of_call for row in pipeline.rows_of(result)]
            answers.append(Answer(rows, len(rows)))
        else:
            answers.append(Answer([], sum(result.command_tuples or 0 for result in of_call)))
    return answers


def _run_on_sqlite(raw: sqlite3.Connection, calls: Sequence[Call]) -> list[Answer]:
    """In the connection's thread."""
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")
    answers = []
    for call in calls:
        rows: list[Row] = []
        changed = 0
        for parameters in call.rows:
            cursor = raw.execute(call.statement.named, parameters)
            rows += cursor.fetchall()
            changed += cursor.rowcount
        answers.append(Answer(rows, len(rows) if call.statement.is_query else changed))
    return answers


async def _translated(
    connection: AsyncConnection, error: psycopg.Error | sqlite3.Error
) -> BaseException:
    """The same error as SQLAlchemy would raise it; a connection that is lost is given up."""
    dialect = connection.dialect
    assert connection.sync_connection is not None
    raw = connection.sync_connection.connection
    # Its annotations want SQLAlchemy's protocol of a driver, which psycopg's own errors do not declare.
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
