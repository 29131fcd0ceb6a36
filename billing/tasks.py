"""Celery's tasks: each runs one async domain function in a transaction of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.settings import AccountsSettings
from billing import outbox_relay, reconcile, sweeps
from billing.celery_app import app
from common.db import Sessions, create_engine, create_sessions
from common.settings import CommonSettings

logger = structlog.get_logger(__name__)

Result = TypeVar("Result")


@app.task
def close_lost_gateways() -> None:
    """Void the holds of API processes that are gone."""
    closed = _run(_in_transaction(sweeps.close_lost_gateways))
    _run(_in_transaction(sweeps.forget_dead_gateways))
    if closed:
        logger.warning("holds closed", count=closed, reason="their gateway is gone")


@app.task
def relay_outbox() -> None:
    """Deliver what transactions have promised."""
    accounts = AccountsSettings()
    _run(lambda sessions: outbox_relay.deliver_due(sessions, accounts))


@app.task
def reconcile_books() -> None:
    """Prove that the books are right, or say loudly that they are not."""
    checks = _run(_in_transaction(reconcile.reconcile))
    for check in checks:
        if not check.is_ok:
            logger.error("books differ", check=check.name, detail=check.detail)
    logger.info("books checked", checks=len(checks), failed=sum(not c.is_ok for c in checks))


def _in_transaction(
    work: Callable[[AsyncSession], Awaitable[Result]],
) -> Callable[[Sessions], Awaitable[Result]]:
    async def run(sessions: Sessions) -> Result:
        async with sessions.begin() as session:
            return await work(session)

    return run


def _run(work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Run async work in this synchronous process, on connections of its own."""

    async def main() -> Result:
        engine = create_engine(CommonSettings().database_url.get_secret_value())
        try:
            return await work(create_sessions(engine))
        finally:
            await engine.dispose()

    return asyncio.run(main())
