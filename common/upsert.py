"""INSERT … ON CONFLICT for both databases: the way to write a row that may be there already.

A unique index in the same transaction as the effect is the only idempotency that survives a race;
on PostgreSQL an integrity error would abort the whole transaction, a conflict clause does not.
"""

from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import CursorResult
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from common.db import Base


def insert_for(session: AsyncSession, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """An INSERT of the session's own dialect, which knows `on_conflict_do_…`."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)


async def insert_or_ignore(
    session: AsyncSession, table: type[Base], values: Mapping[str, Any]
) -> bool:
    """Insert one row; False when a row with the same unique key was there already."""
    statement = insert_for(session, table).values(**values).on_conflict_do_nothing()
    result = cast(CursorResult[Any], await session.execute(statement))
    return result.rowcount == 1
