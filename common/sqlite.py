"""SQLite without needless waits: each statement is one visit to the connection's thread.

aiosqlite gives a thread to each connection. SQLAlchemy's adapter goes there four times for a SELECT
(cursor, execute, fetch, close) and once more for a rollback of nothing: nineteen visits for one hold,
each of which wakes two threads. Here the rows come back with the statement.
"""

import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import aiosqlite
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_dbapi,
)
from sqlalchemy.util import EMPTY_DICT

Result = TypeVar("Result")


async def visit(
    connection: aiosqlite.Connection, work: Callable[..., Result], *arguments: Any
) -> Result:
    """Run `work(raw connection, *arguments)` in the connection's thread."""
    visited: Any = connection  # of its own API only single statements are public
    result: Result = await visited._execute(work, visited._conn, *arguments)
    return result


@dataclass(frozen=True, slots=True)
class _Finished:
    """What a statement came to, once its cursor is closed."""

    description: Any = None
    rowcount: int = -1
    lastrowid: int = 0
    arraysize: int = 1

    def close(self) -> None:
        """It is."""


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    """Executes, fetches and closes in one visit."""

    __slots__ = ()
    _awaitable_cursor_close = False

    def __init__(self, adapt_connection: Any) -> None:
        self._adapt_connection = adapt_connection
        self._connection = adapt_connection._connection
        self._soft_closed_memoized = EMPTY_DICT
        self._rows = deque()
        self._cursor: Any = _Finished()

    async def _execute_async(self, operation: Any, parameters: Any) -> Any:
        await self._visit(lambda raw: raw.execute(operation, parameters or ()))

    async def _executemany_async(self, operation: Any, seq_of_parameters: Any) -> Any:
        await self._visit(lambda raw: raw.executemany(operation, seq_of_parameters))

    async def _visit(self, work: Any) -> None:
        async with self._adapt_connection._execute_mutex:
            self._cursor, rows = await visit(cast(Any, self._connection), _finish, work)
            self._rows = deque(rows)


def _finish(raw: sqlite3.Connection, work: Any) -> tuple[_Finished, list[Any]]:
    """Runs in the connection's thread."""
    cursor = work(raw)
    rows = cursor.fetchall() if cursor.description else []
    finished = _Finished(cursor.description, cursor.rowcount, cursor.lastrowid)
    cursor.close()
    return finished, rows


class _Connection(AsyncAdapt_aiosqlite_connection):
    """Goes to its thread only when there is something to do."""

    __slots__ = ()
    _cursor_cls = _Cursor

    def commit(self) -> None:
        """A COMMIT that fails leaves SQLite's transaction open, and SQLAlchemy believes it ended."""
        try:
            super().commit()
        except Exception:  # raised again, whatever it is
            self.rollback()
            raise

    def rollback(self) -> None:
        """The pool rolls back whatever it gets back, which mostly has been committed."""
        connection: Any = self._connection
        if connection.in_transaction:
            super().rollback()


class QuickSqlite(AsyncAdapt_aiosqlite_dbapi):
    """What `create_async_engine` takes as `module`."""

    def __init__(self) -> None:
        super().__init__(aiosqlite, sqlite3)

    def connect(self, *arguments: Any, **options: Any) -> AsyncAdapt_aiosqlite_connection:
        """A connection and its thread."""
        made = super().connect(*arguments, **options)
        return _Connection(self, made._connection)
