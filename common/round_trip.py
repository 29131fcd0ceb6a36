"""Statements that travel together: one round trip on PostgreSQL, one visit to SQLite's thread.

SQLAlchemy sends a statement and waits for its answer before it sends the next; in a hold's eight
statements most of the time was such waiting, and the way through the ORM's layers. Here statements
are compiled once, and those that need not wait for one another leave at once (`common.pipeline`).
Nothing else changes: each is executed by itself and in order, sees what was committed before it
began, and takes its locks as it would alone.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import ClauseElement, Select, Update
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
Prepared = dict[bytes, bytes]
"""What `common.pipeline` has prepared on a connection."""
R = TypeVar("R")
_SQLITE = SQLiteDialect_aiosqlite(paramstyle="named")
_POSTGRESQL = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]  # theirs
BEGIN, COMMIT = b"BEGIN", b"COMMIT"
_MUST_CHANGE = b"WITH changed AS (%b RETURNING 1) SELECT 1 / count(*) FROM changed"
_MUST_FIND = b"SELECT 1 / count(*) FROM (%b) AS found"
"""Where there is no such row, PostgreSQL itself refuses to go on."""
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
    guarded: bytes
    """The same for PostgreSQL, but it fails where a SELECT finds, or an UPDATE changes, no row."""
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
        text, guarded = str(numbered).encode(), b"%b"
        if isinstance(named.statement, Select):
            guarded = _MUST_FIND
        elif isinstance(named.statement, Update):
            guarded = _MUST_CHANGE
        return cls(
            str(named),
            (text, tuple(numbered.positiontup)),
            guarded % text,
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


class RowMissed(Exception):
    """A SELECT or an UPDATE found no row, so that nothing was committed."""


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
    return await _execute(connection, calls, _run_on_postgresql, _run_on_sqlite)


async def commit_together(connection: AsyncConnection, calls: Sequence[Call]) -> None:
    """Execute `calls` and commit, in one round trip on PostgreSQL.

    Nobody can look at what they came to before it is for good. So each time a SELECT must find its
    row, and an UPDATE change it, or nothing is committed. Raises RowMissed then, and DBAPIError.
    """
    await _execute(connection, calls, _commit_on_postgresql, _write_on_sqlite)
    if connection.dialect.name == "sqlite" and not connection.in_transaction():
        await connection.begin()
    if connection.in_transaction():
        await connection.commit()  # on PostgreSQL only SQLAlchemy does not know of it yet


async def _execute(
    connection: AsyncConnection,
    calls: Sequence[Call],
    on_postgresql: Callable[[psycopg.AsyncConnection[Any], Prepared, Sequence[Call]], Awaitable[R]],
    on_sqlite: Callable[[sqlite3.Connection, Sequence[Call]], R],
) -> R:
    assert connection.sync_connection is not None
    raw = connection.sync_connection.connection
    driver: Any = raw.driver_connection
    try:
        if isinstance(driver, psycopg.AsyncConnection):
            prepared = raw.info.setdefault(PREPARED, {})  # ends with the connection
            return await on_postgresql(driver, prepared, calls)
        return await visit(driver, on_sqlite, calls)
    except (psycopg.Error, sqlite3.Error) as error:
        raise await _translated(connection, error) from error
    except asyncio.CancelledError:
        await connection.invalidate()  # nobody knows how far it has come
        raise


async def _run_on_postgresql(
    driver: psycopg.AsyncConnection[Any], prepared: Prepared, calls: Sequence[Call]
) -> list[Answer]:
    begin = _beginning(driver)
    commands = [*begin, *(command for call in calls for command in _commands(call))]
    results = iter((await pipeline.run(driver, prepared, commands))[len(begin) :])
    answers = []
    for call in calls:
        of_call = list(islice(results, len(call.rows)))
        if call.statement.is_query:
            rows = [row for result in of_call for row in pipeline.rows_of(result)]
            answers.append(Answer(rows, len(rows)))
        else:
            answers.append(Answer([], sum(result.command_tuples or 0 for result in of_call)))
    return answers


async def _commit_on_postgresql(
    driver: psycopg.AsyncConnection[Any], prepared: Prepared, calls: Sequence[Call]
) -> None:
    commands = _beginning(driver)
    for call in calls:
        commands += [(call.statement.guarded, values) for _, values in _commands(call)]
    try:
        await pipeline.run(driver, prepared, [*commands, (COMMIT, ())])
    except psycopg.errors.DivisionByZero as error:
        raise RowMissed from error


def _beginning(driver: psycopg.AsyncConnection[Any]) -> list[pipeline.Command]:
    """BEGIN, unless it has begun."""
    is_new = driver.info.transaction_status == TransactionStatus.IDLE
    return [(BEGIN, ())] if is_new else []


def _commands(call: Call) -> Iterator[pipeline.Command]:
    text, names = call.statement.numbered
    return ((text, [row[name] for name in names]) for row in call.rows)


def _write_on_sqlite(raw: sqlite3.Connection, calls: Sequence[Call]) -> None:
    """In the connection's thread."""
    answers = _run_on_sqlite(raw, calls)
    if any(answer.rowcount != len(call.rows) for call, answer in zip(calls, answers, strict=True)):
        raise RowMissed


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
