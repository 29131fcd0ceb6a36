"""Redis is killed and comes back empty, as a process: everybody finds it again by himself."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
import redis.asyncio

from engine.broker.errors import BrokerUnreachable
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.errors import ModelUnavailable
from engine.messages import GenerateRequest
from tests.engine.broker.conftest import MODEL
from tests.engine.broker.requests import new_frame, new_request, step_of
from tests.services import free_port, redis_binaries

SETTINGS = BrokerSettings(announce_interval_s=0.1, lease_ms=500, patience_s=0.5)


class RestartableRedis:
    """A Redis process on one port that can die and be born again."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = next(iter(redis_binaries().values()))
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._directory)], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        with redis.Redis(port=self.port) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)


@asynccontextmanager
async def running(server: RestartableRedis) -> AsyncIterator[tuple[GatewayBroker, WorkerBroker]]:
    server.start()
    connection = redis.asyncio.Redis.from_url(server.url)
    client = redis.Redis.from_url(server.url)
    gateway = GatewayBroker(connection, "node-1", settings=SETTINGS)
    try:
        await gateway.start()
        yield gateway, WorkerBroker(client, "worker-1", MODEL, settings=SETTINGS)
    finally:
        await gateway.stop()
        await connection.aclose()
        client.close()
        server.kill()


async def take_patiently(worker: WorkerBroker, count: int) -> list[GenerateRequest]:
    taken: list[GenerateRequest] = []
    deadline = time.monotonic() + 10
    while len(taken) < count:
        assert time.monotonic() < deadline
        await asyncio.to_thread(worker.renew, worker.held)
        taken += await asyncio.to_thread(worker.take, 8)
        await asyncio.sleep(0.02)
    return taken


async def test_waiting_and_running_requests_survive_a_redis_that_dies(tmp_path: Path) -> None:
    server = RestartableRedis(tmp_path)
    async with running(server) as (gateway, worker):
        speaking = new_request("req_speaking", key=0.0)
        streams = [await gateway.submit(gateway.prepare(speaking))]
        await take_patiently(worker, 1)
        streams.append(await gateway.submit(gateway.prepare(new_request("req_waiting"))))
        await asyncio.to_thread(worker.renew, worker.held)
        await asyncio.to_thread(worker.publish, {"node-1": step_of(new_frame(speaking, 0, (1,)))})
        assert (await anext(streams[0])).token_ids == (1,)
        await asyncio.sleep(0.3)  # the gateway has looked once

        server.kill()
        with pytest.raises(BrokerUnreachable):
            await asyncio.to_thread(worker.renew, worker.held)
        with pytest.raises(ModelUnavailable):
            await gateway.submit(gateway.prepare(new_request("req_refused")))
        server.start()

        # The worker announces what it runs, the gateway what waits.
        assert await asyncio.to_thread(worker.renew, worker.held) == {}
        [waiting] = await take_patiently(worker, 1)
        assert waiting.request_id == "req_waiting"
        frames = step_of(
            new_frame(speaking, 1, (2,), finish_reason="stop"),
            new_frame(waiting, 0, (3,), finish_reason="stop"),
        )
        await asyncio.to_thread(worker.publish, {"node-1": frames})
        async with asyncio.timeout(5):
            rest = [[frame.token_ids async for frame in stream] for stream in streams]
        assert rest == [[(2,)], [(3,)]]
