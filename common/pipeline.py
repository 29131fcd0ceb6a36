"""PostgreSQL's pipeline on libpq: statements are written at once, and their answers read at once.

psycopg's cursors poll and go through the event loop at each statement of a pipeline, and SQLAlchemy
adds its layers: a hold and its settlement (22 statements) took 2.9 ms of CPU. Here a statement costs
some microseconds and only its answers are waited for. Statements are prepared once a connection.
"""

import asyncio
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

Value = str | int | None
Command = tuple[bytes, Sequence[Value]]
"""A statement with `$1`, `$2`, … and their values."""
_FINISHED = {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}
_INTEGERS = {20, 21, 23}
_BOOLEAN = 16


async def run(
    driver: psycopg.AsyncConnection[Any],
    prepared: MutableMapping[bytes, bytes],
    commands: Sequence[Command],
) -> list[pq.abc.PGresult]:
    """Execute `commands` in order; raises the first failure, and then those after it did not run.

    `prepared` keeps the names of what this connection has prepared. The connection's own statements
    are not prepared by psycopg, which would forget ours with its own at a rollback.
    """
    assert driver.prepare_threshold is None
    encoded = [(text, *_encoded(values)) for text, values in commands]
    async with driver.lock:
        connection = driver.pgconn
        try:
            connection.enter_pipeline_mode()
            answers = _send(connection, prepared, encoded)
            while connection.flush():
                await _ready(connection, is_writing=True)
                connection.consume_input()
            results, failure = await _read(connection, prepared, answers)
            connection.exit_pipeline_mode()
        except BaseException:
            # Interrupted, or lost: what is still to come would be taken for other answers.
            connection.finish()
            raise
    if failure is not None:
        raise failure
    return results


def rows_of(result: pq.abc.PGresult) -> list[tuple[Any, ...]]:
    """What a query has found: strings, integers, booleans and None."""
    kinds = [result.ftype(column) for column in range(result.nfields)]
    return [
        tuple(_decoded(kind, result.get_value(row, column)) for column, kind in enumerate(kinds))
        for row in range(result.ntuples)
    ]


def _send(
    connection: pq.abc.PGconn,
    prepared: Mapping[bytes, bytes],
    commands: Sequence[tuple[bytes, list[bytes | None], list[int]]],
) -> list[tuple[bytes, bytes] | None]:
    """Write everything; returns what each answer is of: a statement and its new name, or a result."""
    names = dict(prepared)
    answers: list[tuple[bytes, bytes] | None] = []
    for text, values, formats in commands:
        name = names.get(text)
        if name is None:
            name = names[text] = b"nc_%d" % len(names)
            connection.send_prepare(name, text)
            answers.append((text, name))
        connection.send_query_prepared(name, values, formats)
        answers.append(None)
    connection.pipeline_sync()
    return answers


async def _read(
    connection: pq.abc.PGconn,
    prepared: MutableMapping[bytes, bytes],
    answers: Sequence[tuple[bytes, bytes] | None],
) -> tuple[list[pq.abc.PGresult], psycopg.Error | None]:
    results = []
    failure: psycopg.Error | None = None
    for new in answers:
        result = await _next(connection)
        assert result is not None
        assert await _next(connection) is None, "each answer ends by itself"
        if result.status not in _FINISHED:
            failure = failure or error_from_result(result)
        elif new is None:
            results.append(result)
        else:
            prepared[new[0]] = new[1]
    end = await _next(connection)
    assert end is not None
    assert end.status == pq.ExecStatus.PIPELINE_SYNC
    return results, failure


async def _next(connection: pq.abc.PGconn) -> pq.abc.PGresult | None:
    while connection.is_busy():
        await _ready(connection)
        connection.consume_input()
    return connection.get_result()


async def _ready(connection: pq.abc.PGconn, *, is_writing: bool = False) -> None:
    """Until something has come, or may be sent."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection.socket, wake)
    if is_writing:
        loop.add_writer(connection.socket, wake)
    try:
        await ready
    finally:
        loop.remove_reader(connection.socket)
        if is_writing:
            loop.remove_writer(connection.socket)


def _encoded(values: Sequence[Value]) -> tuple[list[bytes | None], list[int]]:
    """Strings in binary: as text they would end silently at a NUL, which the server refuses."""
    encoded: list[bytes | None] = []
    formats: list[int] = []
    for value in values:
        if isinstance(value, str):
            encoded.append(value.encode())
            formats.append(pq.Format.BINARY)
        else:
            encoded.append(None if value is None else b"%d" % value)
            formats.append(pq.Format.TEXT)
    return encoded, formats


def _decoded(kind: int, value: bytes | None) -> Any:
    if value is None:
        return None
    if kind in _INTEGERS:
        return int(value)
    return value == b"t" if kind == _BOOLEAN else value.decode()
