"""A connection that is kept from one transaction to the next, while they follow each other closely.

To take one out of the pool and to give it back costs as much as a quarter of a hold: SQLAlchemy enters
a greenlet four times, and rolls back what is committed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


class KeptConnection:
    """One connection for one task. Every transaction on it ends with `common.round_trip`'s commit."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is one to give back."""
        return self._connection is not None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """The connection; where the body fails, it goes back to the pool, which rolls it back."""
        if self._connection is None:
            self._connection = await self._engine.connect()
        try:
            yield self._connection
        except BaseException:
            await self.give_back()
            raise

    async def give_back(self) -> None:
        """Nothing is to be done for now. The pool asks whether it is alive before it is used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
