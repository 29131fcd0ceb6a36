"""Commits that fail: before anything is durable, or after everything is and nobody hears of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from common import pipeline
from common.db import Sessions, create_sessions
from common.round_trip import COMMIT

Fault = Literal["before", "after"]


@dataclass
class Faults:
    """What the next commits suffer, in order; the ones after that succeed."""

    planned: list[Fault | None] = field(default_factory=list)

    def sessions(self, engine: AsyncEngine) -> Sessions:
        """Sessions on an engine whose commits suffer what is planned."""
        plan_faults(engine, self.planned)
        return create_sessions(engine)


def lost_connection() -> OperationalError:
    return OperationalError("COMMIT", None, Exception("the connection was lost"))


@dataclass
class FaultyBegin:
    """Stands for a session factory whose `begin()` suffers what is planned when it commits."""

    real: Sessions
    planned: list[Fault | None] = field(default_factory=list)

    def __call__(self) -> AsyncSession:
        return self.real()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        async with self.real() as session:
            yield session
            fault = self.planned.pop(0) if self.planned else None
            if fault == "before":
                raise lost_connection()
            await session.commit()
            if fault == "after":
                raise lost_connection()


def plan_faults(
    engine: AsyncEngine, planned: list[Fault | None] | None = None
) -> list[Fault | None]:
    """What the next commits on this engine suffer, whoever makes them; to be filled by a test."""
    planned = [] if planned is None else planned
    dialect: Any = engine.sync_engine.dialect
    commit = dialect.do_commit

    def faulty(connection: Any) -> None:
        if _has_committed(connection.driver_connection):
            commit(connection)
            return
        fault = planned.pop(0) if planned else None
        if fault == "before":
            connection.rollback()
            raise lost_connection()
        commit(connection)
        if fault == "after":
            raise lost_connection()

    @event.listens_for(engine.sync_engine, "connect")
    def plan(connection: Any, record: Any) -> None:
        if isinstance(connection.driver_connection, psycopg.AsyncConnection):
            _of_pipelines[connection.driver_connection] = planned

    dialect.do_commit = faulty
    return planned


def _has_committed(driver: Any) -> bool:
    """By `common.pipeline`, so that nothing is left for SQLAlchemy to commit."""
    is_postgresql = isinstance(driver, psycopg.AsyncConnection)
    return is_postgresql and driver.info.transaction_status == TransactionStatus.IDLE


_of_pipelines: WeakKeyDictionary[psycopg.AsyncConnection[Any], list[Fault | None]] = (
    WeakKeyDictionary()
)
_run = pipeline.run


async def _run_and_suffer(
    driver: psycopg.AsyncConnection[Any], prepared: Any, commands: Any
) -> list[Any]:
    """`pipeline.run`, but for a COMMIT among the commands: the connection is really lost."""
    planned = _of_pipelines.get(driver)
    fault = planned.pop(0) if planned and commands[-1][0] == COMMIT else None
    if fault == "before":
        driver.pgconn.finish()
    results = await _run(driver, prepared, commands)
    if fault == "after":
        driver.pgconn.finish()
        raise psycopg.OperationalError("the connection was lost")
    return results


pipeline.run = _run_and_suffer
