"""Celery's tasks: each runs one async domain function, and is safe to run twice or at once."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from accounts import sessions as logins
from accounts import verification
from accounts.mail import Mailer
from accounts.settings import AccountsSettings
from billing import outbox_relay, reconcile, sweeps
from billing.celery_app import app
from common.db import Sessions, create_engine, create_sessions, read_only
from common.settings import CommonSettings

logger = structlog.get_logger(__name__)

Result = TypeVar("Result")


@app.task
def close_lost_gateways() -> None:
    """Void the holds of API processes that are gone, in as many transactions as it takes."""
    closed = run(sweeps.close_all_lost)
    if closed:
        logger.warning("holds_closed", count=closed, reason="their gateway is gone")


@app.task
def relay_outbox() -> None:
    """Deliver what transactions have promised."""
    settings = AccountsSettings()
    mail = partial(verification.deliver, mailer=Mailer(settings), settings=settings)
    run(partial(outbox_relay.deliver_due, handlers={verification.TOPIC: mail}))


@app.task
def reconcile_books() -> None:
    """Prove that the books are right, or say loudly that they are not."""
    checks = run(_reconcile)
    for check in checks:
        if not check.is_ok:
            logger.error("books_differ", check=check.name, detail=check.detail)
    logger.info("books_checked", checks=len(checks), failed=sum(not c.is_ok for c in checks))


@app.task
def purge_expired() -> None:
    """Delete what time has made worthless: sessions, mail tokens, leases of dead gateways."""
    run(_purge)


def run(work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Run async work in this synchronous process, on connections of its own."""

    async def main() -> Result:
        engine = create_engine(CommonSettings().database_url.get_secret_value())
        try:
            return await work(create_sessions(engine))
        finally:
            await engine.dispose()

    return asyncio.run(main())


async def _reconcile(sessions: Sessions) -> list[reconcile.Check]:
    async with read_only(sessions) as session:
        return await reconcile.reconcile(session)


async def _purge(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await logins.purge_expired(session)
        await verification.purge_expired(session)
        await sweeps.forget_dead_gateways(session)
