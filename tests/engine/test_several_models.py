"""One worker process with several tiny models, on a real Redis, seen by a real gateway."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import redis.asyncio

from common.clock import utc_now_us
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.messages import GenerateRequest, Heartbeat, TokenFrame
from engine.worker.hosting import Hosting, write_hostings
from kernels.cpu.build import NATIVE
from tests.engine.driver import request
from tests.engine.tiny import generated, save_tiny
from tests.kernels.cpu_builds import KERNELS, built

pytestmark = pytest.mark.slow

START_S = 60.0
SETTINGS = BrokerSettings(announce_interval_s=0.1, heartbeat_cache_s=0.0, lease_ms=1_500)
PROMPT = list(range(3, 40))
FAMILIES = {"a": "LlamaConfig", "b": "Qwen3Config", "big": "LlamaConfig"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hosting]:
    built(NATIVE)  # a worker that compiled them would not be ready in time
    folder = tmp_path_factory.mktemp("models")
    for name, family in FAMILIES.items():
        (folder / name).mkdir()
        changes: dict[str, object] = {"max_position_embeddings": 8192}
        if name == "big":  # 70 MB of weights
            changes |= {"vocab_size": 9000, "hidden_size": 1024, "max_position_embeddings": 512}
        save_tiny(family, folder / name, **changes)
    (folder / "bad").mkdir()
    save_tiny("LlamaConfig", folder / "bad")
    config = folder / "bad" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 80}))
    (folder / "absurd").mkdir()
    save_tiny("LlamaConfig", folder / "absurd")
    (folder / "absurd" / "config.json").write_text('{"text_config": "none"}')
    return {name: Hosting(name, str(folder / name), "r1") for name in (*FAMILIES, "bad", "absurd")}


class Worker:
    """A worker process, and the file of what it hosts."""

    def __init__(self, redis_url: str, file: Path, hostings: list[Hosting], **settings: object):
        self.file = file
        self.host(hostings)
        environment = os.environ | {
            "NCOMPASS_REDIS_URL": redis_url,
            "NCOMPASS_BROKER_LEASE_MS": str(SETTINGS.lease_ms),
            "NCOMPASS_ENGINE_DTYPE": "fp32",
            "NCOMPASS_ENGINE_NUM_THREADS": "1",
            "NCOMPASS_ENGINE_RENEW_S": "0.4",
            "NCOMPASS_ENGINE_KV_CACHE_MIB": "32",
            "NCOMPASS_ENGINE_KERNEL_CACHE": str(KERNELS),
            "NCOMPASS_ENGINE_CALIBRATION_CACHE": "/tmp/ncompass-test-calibration",
        }
        environment |= {f"NCOMPASS_ENGINE_{key.upper()}": str(settings[key]) for key in settings}
        command = [sys.executable, "-m", "engine.worker", "--models", str(file)]
        self.process = subprocess.Popen([*command, "--worker", "worker"], env=environment)

    def host(self, hostings: list[Hosting]) -> None:
        write_hostings(self.file, hostings)

    @property
    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6


Start = Callable[..., Worker]


@pytest.fixture
def start(clean_redis: str, tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def start_worker(*hostings: Hosting, **settings: object) -> Worker:
        worker = Worker(clean_redis, tmp_path / "models.json", list(hostings), **settings)
        started.append(worker)
        return worker

    yield start_worker
    for worker in started:
        worker.process.kill()
        worker.process.wait(timeout=10)


@pytest.fixture
async def gateway(clean_redis: str) -> AsyncIterator[GatewayBroker]:
    connection = redis.asyncio.Redis.from_url(clean_redis)
    broker = GatewayBroker(connection, "node-1", settings=SETTINGS)
    await broker.start()
    yield broker
    await broker.stop()
    await connection.aclose()


def asked(
    request_id: str, model: str, num_tokens: int, prompt: list[int] = PROMPT
) -> GenerateRequest:
    new = request(request_id, prompt, num_tokens, node="node-1")
    return msgspec.structs.replace(new, model=model, arrival_ms=utc_now_us() // 1_000)


async def state_of(
    gateway: GatewayBroker, model: str, state: str, timeout_s: float = START_S
) -> Heartbeat:
    """The first heartbeat of `model` that says `state`."""
    async with asyncio.timeout(timeout_s):
        while True:
            for beat in await gateway.heartbeats(model):
                if beat.state == state:
                    return beat
            await asyncio.sleep(0.05)


async def frames_of(gateway: GatewayBroker, new: GenerateRequest) -> list[TokenFrame]:
    async with asyncio.timeout(60):
        stream = await gateway.submit(gateway.prepare(new))
        return [frame async for frame in stream]


async def tokens_of(gateway: GatewayBroker, new: GenerateRequest) -> list[int]:
    return [token for frame in await frames_of(gateway, new) for token in frame.token_ids]


async def test_two_models_answer_at_once_as_generate_does_and_a_bad_one_is_told_in_a_sentence(
    start: Start, gateway: GatewayBroker, checkpoints: dict[str, Hosting]
) -> None:
    start(checkpoints["bad"], checkpoints["absurd"], checkpoints["a"], checkpoints["b"])
    unread = await state_of(gateway, "absurd", "failed")
    assert unread.load_report.startswith("its files cannot be read: ")
    failed = await state_of(gateway, "bad", "failed")
    assert "shape (64, 96), the config says (64, 80)" in failed.load_report
    assert not failed.is_serving
    beats = [await state_of(gateway, name, "ready") for name in ("a", "b")]
    assert beats[0].pid == beats[1].pid

    prompts = [list(range(first, 2 * first + 20)) for first in range(1, 5)]
    answers = await asyncio.gather(
        *(
            tokens_of(gateway, asked(f"{name}{index}", name, 24, prompt))
            for name in ("a", "b")
            for index, prompt in enumerate(prompts)
        )
    )
    assert answers[:4] == generated(checkpoints["a"].directory, prompts, 24)
    assert answers[4:] == generated(checkpoints["b"].directory, prompts, 24)


async def test_an_idle_model_leaves_its_memory_and_comes_back_for_the_first_request(
    start: Start, gateway: GatewayBroker, checkpoints: dict[str, Hosting]
) -> None:
    worker = start(checkpoints["big"], checkpoints["a"], idle_unload_s=3)
    await state_of(gateway, "big", "ready")
    first = await tokens_of(gateway, asked("first", "big", 12))
    loaded_mb = worker.rss_mb
    beat = await state_of(gateway, "big", "unloaded", 20)
    assert beat.is_serving
    assert beat.cost_model is not None, "requests are priced while they wait for it"
    assert worker.rss_mb < loaded_mb - 50, "its weights have left the process"

    again = await tokens_of(gateway, asked("again", "big", 12))
    assert again == first == generated(checkpoints["big"].directory, [PROMPT], 12)[0]


async def test_a_stream_goes_on_while_a_model_is_added_and_the_least_used_one_leaves_for_it(
    start: Start, gateway: GatewayBroker, checkpoints: dict[str, Hosting]
) -> None:
    # Room for two: 32 MiB of KV cache each, and little else.
    worker = start(checkpoints["a"], checkpoints["b"], memory_mib=70)
    await state_of(gateway, "b", "ready")
    await state_of(gateway, "a", "ready")
    stream = await gateway.submit(gateway.prepare(asked("stream", "a", 3000)))
    tokens = list((await anext(stream)).token_ids)
    arrivals = [time.monotonic()]

    async def read() -> None:
        async for frame in stream:
            tokens.extend(frame.token_ids)
            arrivals.append(time.monotonic())

    reading = asyncio.create_task(read())
    await asyncio.sleep(2.5)
    added = msgspec.structs.replace(checkpoints["b"], name="b2")
    worker.host([checkpoints["a"], checkpoints["b"], added])
    await state_of(gateway, "b2", "unloaded", 10)
    late = await tokens_of(gateway, asked("late", "b2", 12))
    assert late == generated(checkpoints["b"].directory, [PROMPT], 12)[0]
    assert not reading.done(), "the stream ran all the time"
    (beat,) = await gateway.heartbeats("b")
    assert beat.state == "unloaded", "the idle one has left, and not the one that streams"
    await reading
    assert len(tokens) == 3000
    assert tokens[:40] == generated(checkpoints["a"].directory, [PROMPT], 40)[0]
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    assert max(gaps) < 2.0

    worker.host([checkpoints["a"], added])  # b is hosted no more
    async with asyncio.timeout(10):
        while await gateway.heartbeats("b"):
            await asyncio.sleep(0.1)
    assert (await state_of(gateway, "a", "ready", 5)).state == "ready"


async def test_a_killed_worker_with_two_models_loses_no_request_of_either(
    start: Start, gateway: GatewayBroker, checkpoints: dict[str, Hosting]
) -> None:
    worker = start(checkpoints["a"], checkpoints["b"])
    await state_of(gateway, "a", "ready")
    await state_of(gateway, "b", "ready")
    streams = [await gateway.submit(gateway.prepare(asked(name, name, 700))) for name in ("a", "b")]
    heard = [list((await anext(stream)).token_ids) for stream in streams]
    worker.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(worker.process.wait, 10)
    start(checkpoints["a"], checkpoints["b"])
    async with asyncio.timeout(START_S):
        for stream, tokens in zip(streams, heard, strict=True):
            async for frame in stream:
                tokens.extend(frame.token_ids)
    for name, tokens in zip(("a", "b"), heard, strict=True):
        assert len(tokens) == 700
        expected = generated(checkpoints[name].directory, [PROMPT], 40)[0]
        assert tokens[:40] == expected
