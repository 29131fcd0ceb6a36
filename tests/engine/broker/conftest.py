"""A clean Redis of each version that the product supports, and brokers on it."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis
import redis.asyncio

from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from tests.services import redis_binaries, running_redis

MODEL = "test/{model}"
"""Braces, because a name may hold what Redis gives a meaning to."""

SETTINGS = BrokerSettings(announce_interval_s=0.05, heartbeat_cache_s=0.0, patience_s=1.0)


@pytest.fixture(scope="session", params=sorted(redis_binaries()))
def each_redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The Redis on the PATH (7 here) and the embedded one (6.2)."""
    with running_redis(redis_binaries()[request.param]) as url:
        yield url


@pytest.fixture
def client(each_redis_url: str) -> "Iterator[redis.Redis]":
    """A connection to an empty Redis."""
    with redis.Redis.from_url(each_redis_url) as client:
        client.flushall()
        yield client


Workers = Callable[..., WorkerBroker]
Gateways = Callable[..., GatewayBroker]


@pytest.fixture
def new_worker(client: redis.Redis) -> Workers:
    """Makes workers."""

    def make(name: str = "worker-1", settings: BrokerSettings = SETTINGS) -> WorkerBroker:
        return WorkerBroker(client, name, MODEL, settings=settings)

    return make


@pytest.fixture
async def new_gateway(each_redis_url: str, client: redis.Redis) -> AsyncIterator[Gateways]:
    """Makes gateways; `await gateway.start()` is left to the test, the end is not."""
    made: list[tuple[GatewayBroker, redis.asyncio.Redis]] = []

    def make(node: str = "node-1", settings: BrokerSettings = SETTINGS) -> GatewayBroker:
        connection = redis.asyncio.Redis.from_url(each_redis_url)
        gateway = GatewayBroker(connection, node, settings=settings)
        made.append((gateway, connection))
        return gateway

    yield make
    for gateway, connection in made:
        await gateway.stop()
        await connection.aclose()
