"""What the broker's tests do again and again."""

import asyncio
import time

import redis

from engine.broker.gateway import GatewayBroker
from engine.broker.keys import Keys
from engine.broker.worker import WorkerBroker
from engine.messages import GenerateRequest, Heartbeat
from tests.engine.broker.conftest import MODEL, Gateways

KEYS = Keys(MODEL)


async def eventually(claim: object, timeout_s: float = 5.0) -> None:
    """Wait until `claim()` holds."""
    assert callable(claim)
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


def expire_lease(client: redis.Redis, request: GenerateRequest) -> None:
    """Let the worker that holds `request` look dead."""
    client.zadd(KEYS.prefix + "lease", {request.request_id: 0})
    client.delete(KEYS.prefix + "swept")


def new_heartbeat(worker: str = "worker-1") -> Heartbeat:
    """What a worker says of itself."""
    return Heartbeat(
        worker=worker,
        model=MODEL,
        revision="r",
        state="ready",
        sent_ms=1,
        pid=1,
        dtype="fp32",
        context_length=64,
    )


async def started(new_gateway: Gateways, node: str = "node-1") -> GatewayBroker:
    """An API node that runs."""
    gateway = new_gateway(node)
    await gateway.start()
    return gateway


async def take(worker: WorkerBroker, count: int = 8) -> list[GenerateRequest]:
    """What a worker takes now."""
    return await asyncio.to_thread(worker.take, count)
