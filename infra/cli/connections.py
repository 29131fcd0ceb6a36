"""How a command reaches the database and the queue of the platform on this machine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from billing.stripe_client import Payments
from billing.stripe_settings import StripeSettings
from common.db import Sessions, create_engine, create_sessions
from engine.broker.gateway import GatewayBroker
from infra.connections import open_broker
from infra.local.wiring import database_url
from infra.settings import InfraSettings

Result = TypeVar("Result")

THREAD_GRACE_S = 0.1


def run_in_transaction(work: Callable[[AsyncSession], Awaitable[Result]]) -> Result:
    """Run `work` in one transaction on the configured database."""

    async def main() -> Result:
        engine = create_engine(database_url(InfraSettings()))
        try:
            async with create_sessions(engine).begin() as session:
                return await work(session)
        finally:
            await engine.dispose()
            # aiosqlite's thread of a connection that could not be opened still has a word for the
            # loop; without a moment to say it, it complains on standard error.
            await asyncio.sleep(THREAD_GRACE_S)

    return asyncio.run(main())


def run_with_payments(work: Callable[[Sessions, Payments | None], Awaitable[Result]]) -> Result:
    """Run `work` on the configured database, and at Stripe where payments are set up."""

    async def main() -> Result:
        engine = create_engine(database_url(InfraSettings()))
        stripe = StripeSettings()
        payments = Payments(stripe) if stripe.is_on else None
        try:
            return await work(create_sessions(engine), payments)
        finally:
            if payments is not None:
                await payments.close()
            await engine.dispose()
            await asyncio.sleep(THREAD_GRACE_S)

    return asyncio.run(main())


def run_with_broker(redis_url: str, work: Callable[[GatewayBroker], Awaitable[Result]]) -> Result:
    """Run `work` as one more node of the queue."""

    async def main() -> Result:
        async with open_broker(redis_url) as broker:
            return await work(broker)

    return asyncio.run(main())
