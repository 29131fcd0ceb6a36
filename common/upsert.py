"""INSERT … ON CONFLICT for both databases: the way to write a row that may be there already.

A unique index in the same transaction as the effect is the only idempotency that survives a race;
on PostgreSQL an integrity error would abort the whole transaction, a conflict clause does not.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from common.db import Base


def insert_for(session: AsyncSession, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """An INSERT of the session's own dialect, which knows `on_conflict_do_…`."""
    return insert_of(session.get_bind().dialect.name, table)


def insert_of(dialect: str, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """The same by the dialect's name."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


async def insert_or_ignore(
    session: AsyncSession, table: type[Base], values: Mapping[str, Any]
) -> bool:
    """Insert one row; False when a row with the same unique key was there already."""
    # NOTE: asked by RETURNING, because psycopg does not count the rows of an INSERT (it says -1).
    statement = (
        insert_for(session, table)
        .values(**values)
        .on_conflict_do_nothing()
        .returning(*table.__table__.primary_key)
    )
    return (await session.execute(statement)).first() is not None
