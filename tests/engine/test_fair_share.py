"""Fair with no rate limit, live: a tenant with hundreds of queued requests, and another with one."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import redis
import redis.asyncio

from common.clock import utc_now_us
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.stream import RequestStream
from engine.broker.worker import WorkerBroker
from engine.engine import Engine
from engine.messages import CostModel, GenerateRequest, Timing
from engine.model_runner import ModelRunner
from engine.settings import EngineSettings
from engine.structures.grammar import Grammar
from tests.engine.driver import request
from tests.engine.fake_model import FakeModel
from tests.engine.worker_threads import WorkerThreads

MODEL = "test/fair"
NUM_GREEDY = 300
SETTINGS = EngineSettings(max_running=2, take_window=4, heartbeat_s=0.1, step_s=0.01)
COST = CostModel(base_s=1e-3, per_token_s=1e-5, per_prefill_context_s=0.0, per_decode_context_s=0.0)


class NotingEngine(Engine):
    """Remembers the order in which requests were taken."""

    taken: list[str]

    def add(self, request: GenerateRequest, grammar: Grammar | None = None) -> None:
        self.taken.append(request.request_id)
        super().add(request, grammar)


@pytest.fixture
def worker(clean_redis: str) -> Iterator[NotingEngine]:
    """A worker that runs two requests at a time and takes four more at most."""
    runner = ModelRunner(FakeModel(), 64)
    engine = NotingEngine(runner, SETTINGS, 64, cost_model=COST, now_us=_slow_machine_us)
    engine.taken = []
    with redis.Redis.from_url(clean_redis) as connection:
        broker = WorkerBroker(connection, "worker", MODEL, settings=BrokerSettings())
        threads = WorkerThreads(engine, broker, SETTINGS)
        yield engine
        threads.stop()


@pytest.fixture
async def gateway(clean_redis: str) -> AsyncIterator[GatewayBroker]:
    connection = redis.asyncio.Redis.from_url(clean_redis)
    broker = GatewayBroker(connection, "node", settings=BrokerSettings())
    await broker.start()
    yield broker
    await broker.stop()
    await connection.aclose()


def _slow_machine_us() -> int:
    """A machine that takes tens of milliseconds for a step, as far as its clock can tell."""
    return time.perf_counter_ns() // 50


def asked(request_id: str, tenant: str, key: float) -> GenerateRequest:
    new = request(request_id, [1, 2, 3], 12, tenant=tenant, key=key)
    return msgspec.structs.replace(new, model=MODEL, arrival_ms=utc_now_us() // 1_000, work_s=0.01)


async def test_the_only_request_of_a_tenant_is_computed_next_beside_hundreds_of_another(
    worker: NotingEngine, gateway: GatewayBroker
) -> None:
    first_timing: dict[str, Timing] = {}

    async def read(stream: RequestStream) -> None:
        async for frame in stream:
            if frame.first_index == 0 and frame.timing is not None:
                first_timing[frame.request_id] = frame.timing

    async def ask(request_id: str, tenant: str, key: float) -> "asyncio.Task[None]":
        stream = await gateway.submit(gateway.prepare(asked(request_id, tenant, key)))
        return asyncio.create_task(read(stream))

    async with asyncio.timeout(60):
        reading = [await ask(f"greedy-{i}", "greedy", i * 1e-6) for i in range(NUM_GREEDY)]
        while len(first_timing) < 10:
            await asyncio.sleep(0.01)
        # It is the longest of all: inside of a tenant that would matter, between two it does not.
        modest = await ask("modest", "modest", 0.1)
        num_before, num_answered = len(worker.taken), len(first_timing)
        await modest
        await asyncio.gather(*reading)

    assert num_before < NUM_GREEDY - 50, "the other tenant's queue is still long"
    assert worker.taken.index("modest") <= num_before + SETTINGS.take_window, "it is taken next"
    place = list(first_timing).index("modest")
    assert place <= num_answered + 2 * SETTINGS.max_running, "and computed next"
    receipt = first_timing["modest"]
    assert (receipt.behind_own_us, receipt.num_tenants) == (0, 2)
    assert 0 < receipt.behind_others_us <= receipt.queued_us
    last = first_timing[f"greedy-{NUM_GREEDY - 1}"]
    assert last.behind_own_us > last.behind_others_us
