"""Delivers the outbox: one handler per topic, each safe to run twice.

No transaction is open while a handler works: a slow mail server must not hold SQLite's write lock,
which every request's money needs.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from common import outbox
from common.clock import Clock, utc_now_us
from common.db import Sessions

logger = structlog.get_logger(__name__)

Handler = Callable[[Sessions, dict[str, Any]], Awaitable[None]]

MAX_PER_CLAIM = 10
"""So few that all of them, at a mail server's time limit each, end before Celery's."""


async def deliver_due(
    sessions: Sessions, handlers: Mapping[str, Handler], *, clock: Clock = utc_now_us
) -> int:
    """Deliver some of what is due; returns how many messages were delivered.

    A failed one is noted and comes up again later; it does not keep the others from going out.
    """
    async with sessions.begin() as session:
        messages = await outbox.claim(session, limit=MAX_PER_CLAIM, clock=clock)
    delivered = 0
    for message in messages:
        error = await _deliver(sessions, handlers, message)
        async with sessions.begin() as session:
            if error is None:
                await outbox.mark_done(session, message.id, clock=clock)
                delivered += 1
            else:
                await outbox.mark_failed(session, message.id, error)
    return delivered


async def _deliver(
    sessions: Sessions, handlers: Mapping[str, Handler], message: outbox.OutboxMessage
) -> str | None:
    """Run the handler; returns why it failed, by the error's name alone: its text may be personal."""
    handler = handlers.get(message.topic)
    if handler is None:
        error = "NoHandler"
    else:
        try:
            await handler(sessions, message.payload)
        except Exception as fault:  # a task's seam: whatever it is, the others go on
            error = type(fault).__name__
        else:
            return None
    logger.warning("outbox_failed", message=message.id, topic=message.topic, error=error)
    return error
