"""The same bits after a real preemption and after a real failover: tokens and log-probabilities.

`test_invariance` shows it for the model's logits; here whole engines and worker processes do what
disturbs a sequence. Log-probabilities are floats of every step's logits: equal ones are equal bits.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
import torch

from common.clock import utc_now_us
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.engine import Engine
from engine.messages import GenerateRequest, Heartbeat, Sampling, TokenFrame, TokenLogprob
from engine.model_runner import ModelRunner
from engine.models.decoder import load_decoder
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from kernels.linear import Quantization
from tests.engine.driver import Driver, Received, request
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import KERNELS, built

MODEL = "test/tiny"
DRAWN = Sampling(temperature=1.0, seed=11, num_logprobs=20)
"""By chance, so that a logit of one other bit somewhere would soon be another text."""
PROMPT = [3 + (index * 37) % 300 for index in range(200)]
NUM_TOKENS = 1_000
SETTINGS = BrokerSettings(announce_interval_s=0.1, heartbeat_cache_s=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built(NATIVE)
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", directory, max_position_embeddings=4096)
    return directory


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_preempted_sequence_goes_on_with_the_same_bits(
    checkpoint: Path, quantization: Quantization
) -> None:
    """Its KV is dropped and computed again, in other chunks and beside other sequences."""
    library.enable(built(NATIVE), num_threads=2)
    model = load_decoder(checkpoint, torch.bfloat16, torch.device("cpu"), quantization)
    names = [f"r{index}" for index in range(4)]

    def run(num_blocks: int, asked: list[str]) -> Driver:
        driver = Driver(Engine(ModelRunner(model, num_blocks), EngineSettings(), num_blocks))
        for name in asked:
            prompt = [(token * (3 + int(name[1:]))) % 320 for token in PROMPT[:70]]
            driver.add(request(name, prompt, 110, sampling=DRAWN))
        driver.run()
        return driver

    scarce = run(7, names)
    assert scarce.engine.stats.num_preemptions > 0
    for name in names:
        alone = run(8, [name])
        assert alone.engine.stats.num_preemptions == 0
        assert bits(scarce.received[name, 0]) == bits(alone.received[name, 0])
    library.disable()


def bits(received: Received) -> tuple[list[int], list[TokenLogprob]]:
    assert len(received.logprobs) == len(received.token_ids) == 110
    return received.token_ids, received.logprobs


@pytest.fixture
def workers(checkpoint: Path, clean_redis: str, tmp_path: Path) -> Iterator[None]:
    """Two workers of one model, in bf16 with the compiled kernels."""
    environment = os.environ | {
        "NCOMPASS_REDIS_URL": clean_redis,
        "NCOMPASS_ENGINE_DTYPE": "bf16",
        "NCOMPASS_ENGINE_NUM_THREADS": "1",
        "NCOMPASS_ENGINE_KV_CACHE_MIB": "64",
        "NCOMPASS_ENGINE_KERNEL_CACHE": str(KERNELS),
        "NCOMPASS_ENGINE_CALIBRATION_CACHE": str(tmp_path / "calibration"),
    }
    command = [sys.executable, "-m", "engine.worker", "--model", MODEL, "--path", str(checkpoint)]
    started = [
        subprocess.Popen([*command, "--worker", name], env=environment) for name in ("one", "two")
    ]
    yield
    for process in started:
        process.kill()
        process.wait(timeout=10)


@pytest.fixture
async def gateway(clean_redis: str) -> AsyncIterator[GatewayBroker]:
    connection = redis.asyncio.Redis.from_url(clean_redis)
    broker = GatewayBroker(connection, "node-1", settings=SETTINGS)
    await broker.start()
    yield broker
    await broker.stop()
    await connection.aclose()


async def workers_where(
    gateway: GatewayBroker, *, num_ready: int = 0, num_running: int = 0
) -> list[Heartbeat]:
    async with asyncio.timeout(90):
        while True:
            ready = [beat for beat in await gateway.heartbeats(MODEL) if beat.state == "ready"]
            busy = [beat for beat in ready if beat.num_running]
            if len(ready) >= num_ready and len(busy) >= num_running:
                return busy if num_running else ready
            await asyncio.sleep(0.05)


def asked(request_id: str) -> GenerateRequest:
    new = request(request_id, PROMPT, NUM_TOKENS, sampling=DRAWN, node="node-1")
    return msgspec.structs.replace(new, model=MODEL, arrival_ms=utc_now_us() // 1_000)


async def frames_of(gateway: GatewayBroker, new: GenerateRequest) -> list[TokenFrame]:
    async with asyncio.timeout(120):
        stream = await gateway.submit(gateway.prepare(new))
        return [frame async for frame in stream]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
async def test_a_sequence_whose_worker_is_killed_goes_on_with_the_same_bits(
    gateway: GatewayBroker,
) -> None:
    await workers_where(gateway, num_ready=2)
    running = asyncio.create_task(frames_of(gateway, asked("disturbed")))
    (serving,) = await workers_where(gateway, num_running=1)
    os.kill(serving.pid, signal.SIGKILL)
    assert not running.done(), "it was killed in the middle"
    disturbed = await running
    attempts = [frame.attempt for frame in disturbed]
    assert attempts[0] == 1, "tokens of the first worker were sent"
    assert attempts[-1] > 1
    undisturbed = await frames_of(gateway, asked("undisturbed"))
    assert {frame.attempt for frame in undisturbed} == {1}
    assert _told(disturbed) == _told(undisturbed)


def _told(frames: list[TokenFrame]) -> list[tuple[int, TokenLogprob]]:
    told = [
        (token, logprob)
        for frame in frames
        for token, logprob in zip(frame.token_ids, frame.logprobs or (), strict=True)
    ]
    assert len(told) == NUM_TOKENS
    return told
