"""How a process that is neither API nor worker reaches the queue."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from common.ids import new_id
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings


@asynccontextmanager
async def open_broker(redis_url: str) -> AsyncIterator[GatewayBroker]:
    """One more node of the queue, while the context is open."""
    async with Redis.from_url(redis_url) as redis:
        broker = GatewayBroker(redis, new_id("node"), settings=BrokerSettings())
        await broker.start()
        try:
            yield broker
        finally:
            await broker.stop()
