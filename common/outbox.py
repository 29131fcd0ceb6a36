"""Effects that must follow a commit: promised in the same transaction, done by a relay later.

The row is the promise; Celery only makes the relay run sooner. An effect may happen twice (the
relay can die after it and before the mark), so each must be safe to repeat.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Index, String, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Base
from common.ids import new_id
from common.upsert import insert_or_ignore

MAX_ATTEMPTS = 20
FIRST_RETRY_S = 60
"""Longer than any effect takes, so that a slow relay's message is not claimed by a second one."""
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


async def promise(
    session: AsyncSession,
    *,
    topic: str,
    key: str,
    payload: dict[str, Any],
    clock: Clock = utc_now_us,
) -> bool:
    """Promise an effect in the caller's transaction; False when `key` was promised before.

    The payload names things by id and holds no secret: it stays in the table.
    """
    now_us = clock()
    values = {
        "id": new_id("out"),
        "topic": topic,
        "key": key,
        "payload": payload,
        "attempts": 0,
        "next_attempt_at": now_us,
        "done_at": None,
        "error": None,
        "created_at": now_us,
    }
    return await insert_or_ignore(session, OutboxMessage, values)


async def claim(
    session: AsyncSession, *, limit: int, clock: Clock = utc_now_us
) -> list[OutboxMessage]:
    """Take what is due, oldest first. Commit before the effects: they may take long.

    A claim is an attempt, and what is not marked done comes up again after twice the last wait;
    so a relay that dies loses nothing.
    """
    now_us = clock()
    found = await session.scalars(
        select(OutboxMessage)
        .where(
            OutboxMessage.done_at.is_(None),
            OutboxMessage.attempts < MAX_ATTEMPTS,
            OutboxMessage.next_attempt_at <= now_us,
        )
        .order_by(OutboxMessage.next_attempt_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    messages = list(found)
    for message in messages:
        wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S << message.attempts)
        message.next_attempt_at = now_us + wait_s * MICROSECONDS_PER_SECOND
        message.attempts += 1
    await session.flush()
    return messages


async def mark_done(session: AsyncSession, message_id: str, *, clock: Clock = utc_now_us) -> None:
    """The effect has happened."""
    await _set(session, message_id, done_at=clock(), error=None)


async def mark_failed(session: AsyncSession, message_id: str, error: str) -> None:
    """Note why the effect has not happened; `error` holds no secret."""
    await _set(session, message_id, error=error[:500])


async def _set(session: AsyncSession, message_id: str, **values: Any) -> None:
    await session.execute(
        update(OutboxMessage)
        .where(OutboxMessage.id == message_id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )
