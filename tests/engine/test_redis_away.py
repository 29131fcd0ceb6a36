"""A real Redis dies under a real worker loop and comes back empty: what runs goes on."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import torch

from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.settings import EngineSettings
from tests.engine.broker.test_restart import RestartableRedis
from tests.engine.driver import request
from tests.engine.fake_model import FakeModel, expected_output
from tests.engine.worker_threads import WorkerThreads

PROMPT = [5, 6, 7]
NUM_TOKENS = 700
BROKER = BrokerSettings(announce_interval_s=0.1, lease_ms=5_000)


class SlowModel(FakeModel):
    """A step takes a few milliseconds, as it would."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        time.sleep(0.004)
        return super().forward(*arguments)


class LiveWorker(WorkerThreads):
    """The threads of a worker on `url`."""

    def __init__(self, url: str) -> None:
        settings = EngineSettings(heartbeat_s=0.1, renew_s=0.2, redis_backoff_s_max=0.3)
        self.engine = Engine(ModelRunner(SlowModel(), 64), settings, 64)
        self.redis = redis.Redis.from_url(url, socket_timeout=5.0, retry=None)
        broker = WorkerBroker(self.redis, "worker-1", "model", settings=BROKER)
        super().__init__(self.engine, broker, settings)

    def stop(self) -> None:
        super().stop()
        self.redis.close()


@pytest.mark.slow
async def test_a_stream_goes_on_over_the_death_of_redis_and_loses_no_token(
    tmp_path: Path,
) -> None:
    server = RestartableRedis(tmp_path)
    server.start()
    connection = redis.asyncio.Redis.from_url(server.url)
    gateway = GatewayBroker(connection, "node", settings=BROKER)
    worker = LiveWorker(server.url)
    try:
        await gateway.start()
        stream = await gateway.submit(gateway.prepare(request("a", PROMPT, NUM_TOKENS)))
        text = list((await anext(stream)).token_ids)
        await asyncio.sleep(0.5)  # the gateway has looked, the worker has renewed

        server.kill()
        at_death = worker.engine.stats.output_tokens_total
        await asyncio.sleep(0.8)
        assert worker.engine.stats.output_tokens_total > at_death + 50, "it stopped computing"
        server.start()

        async with asyncio.timeout(20):
            async for frame in stream:
                text += frame.token_ids
        assert text == expected_output(PROMPT, NUM_TOKENS)
        assert worker.engine.problems() == []
        assert worker.engine.stats.free_kv_tokens == worker.engine.stats.total_kv_tokens
    finally:
        worker.stop()
        await gateway.stop()
        await connection.aclose()
        server.kill()
