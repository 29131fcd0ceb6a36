"""Effects that must follow a commit: written in the same transaction, done by a relay later.

The row is the promise; Celery only makes the relay run sooner. An effect may happen twice (the
relay can die after it and before the mark), so each must be safe to repeat.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Index, String, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from common.clock import MICROSECONDS_PER_SECOND, utc_now_us
from common.db import Base
from common.ids import new_id
from common.upsert import insert_or_ignore

MAX_ATTEMPTS = 20
FIRST_RETRY_S = 5
LONGEST_RETRY_S = 3_600


class OutboxMessage(Base):
    """One promised effect. `key` names it, so that it is promised once."""

    __tablename__ = "outbox"
    __table_args__ = (
        Index(
            "ix_outbox_due",
            "next_attempt_at",
            sqlite_where=text("done_at IS NULL"),
            postgresql_where=text("done_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    topic: Mapped[str]
    key: Mapped[str] = mapped_column(String, unique=True)
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    attempts: Mapped[int]
    next_attempt_at: Mapped[int] = mapped_column(BigInteger)
    done_at: Mapped[int | None] = mapped_column(BigInteger)
    error: Mapped[str | None]
    created_at: Mapped[int] = mapped_column(BigInteger)


async def promise(session: AsyncSession, *, topic: str, key: str, payload: dict[str, Any]) -> bool:
    """Promise an effect in the caller's transaction; False when `key` was promised before."""
    now_us = utc_now_us()
    values = {
        "id": new_id("out"),
        "topic": topic,
        "key": key,
        "payload": payload,
        "attempts": 0,
        "next_attempt_at": now_us,
        "created_at": now_us,
    }
    return await insert_or_ignore(session, OutboxMessage, values)


async def due(session: AsyncSession, *, limit: int) -> list[OutboxMessage]:
    """Messages to deliver now, locked against other relays, oldest first."""
    found = await session.scalars(
        select(OutboxMessage)
        .where(
            OutboxMessage.done_at.is_(None),
            OutboxMessage.attempts < MAX_ATTEMPTS,
            OutboxMessage.next_attempt_at <= utc_now_us(),
        )
        .order_by(OutboxMessage.next_attempt_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return list(found)


def mark_done(message: OutboxMessage) -> None:
    """The effect has happened."""
    message.done_at = utc_now_us()
    message.error = None


def mark_failed(message: OutboxMessage, error: str) -> None:
    """Try again later, each time after twice the wait."""
    wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S << min(message.attempts, 16))
    message.attempts += 1
    message.next_attempt_at = utc_now_us() + wait_s * MICROSECONDS_PER_SECOND
    message.error = error[:500]
