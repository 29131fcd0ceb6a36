"""The worker as a real process on a real Redis, seen by a real gateway."""

import asyncio
import contextlib
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
from engine.messages import CheckIntegrity, GenerateRequest, Heartbeat, TokenFrame
from kernels.cpu.build import NATIVE
from tests.engine.driver import request
from tests.engine.tiny import generated, save_tiny
from tests.kernels.cpu_builds import KERNELS, built

MODEL = "test/tiny"
PROMPT = list(range(3, 40))
START_S = 60.0
SETTINGS = BrokerSettings(announce_interval_s=0.1, heartbeat_cache_s=0.0)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built(NATIVE)  # a worker that compiled them would not be ready in time
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", directory, max_position_embeddings=8192)
    return directory


@pytest.fixture
def start(checkpoint: Path, clean_redis: str) -> Iterator[Start]:
    """Starts workers; those that are still there at the end are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(prefix: tuple[str, ...] = (), *options: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "NCOMPASS_REDIS_URL": clean_redis,
            "NCOMPASS_ENGINE_DTYPE": "fp32",
            "NCOMPASS_ENGINE_NUM_THREADS": "1",
            "NCOMPASS_ENGINE_KV_CACHE_MIB": "64",
            "NCOMPASS_ENGINE_KERNEL_CACHE": str(KERNELS),
            "NCOMPASS_ENGINE_CALIBRATION_CACHE": "/tmp/ncompass-test-calibration",
            "NCOMPASS_ENGINE_DRAIN_TIMEOUT_S": "20",
        }
        command = [sys.executable, "-m", "engine.worker", "--model", MODEL]
        command += ["--path", str(checkpoint), "--revision", "r1"]
        process = subprocess.Popen([*prefix, *command, *options], env=environment)
        started.append(process)
        return process

    yield start_worker
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


def asked(request_id: str, num_tokens: int, prompt: list[int] = PROMPT) -> GenerateRequest:
    new = request(request_id, prompt, num_tokens, node="node-1")
    return msgspec.structs.replace(new, model=MODEL, arrival_ms=utc_now_us() // 1_000)


async def heartbeat_where(
    gateway: GatewayBroker, is_wanted: Callable[[Heartbeat], bool], timeout_s: float = START_S
) -> Heartbeat:
    async with asyncio.timeout(timeout_s):
        while True:
            for heartbeat in await gateway.heartbeats(MODEL):
                if is_wanted(heartbeat):
                    return heartbeat
            await asyncio.sleep(0.05)


async def is_ready(gateway: GatewayBroker) -> Heartbeat:
    return await heartbeat_where(gateway, lambda heartbeat: heartbeat.state == "ready")


async def frames_of(gateway: GatewayBroker, new: GenerateRequest) -> list[TokenFrame]:
    async with asyncio.timeout(60):
        stream = await gateway.submit(gateway.prepare(new))
        return [frame async for frame in stream]


def tokens_of(frames: list[TokenFrame]) -> list[int]:
    return [token for frame in frames for token in frame.token_ids]


async def test_a_worker_answers_tells_of_itself_and_idles(
    start: Start, gateway: GatewayBroker, checkpoint: Path
) -> None:
    process = start()
    heartbeat = await is_ready(gateway)
    assert (heartbeat.pid, heartbeat.dtype, heartbeat.revision) == (process.pid, "fp32", "r1")
    assert heartbeat.free_kv_tokens == heartbeat.total_kv_tokens > 0
    assert heartbeat.cost_model is not None
    assert heartbeat.cost_model.work_s(100) > 0

    prompts = [list(range(start_at, start_at + 20 + start_at)) for start_at in range(4)]
    new = [asked(f"r{index}", 30, prompt) for index, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(frames_of(gateway, one) for one in new))
    assert [tokens_of(frames) for frames in answers] == generated(checkpoint, prompts, 30)
    timing = answers[0][-1].timing
    assert timing is not None
    assert 0 < timing.prefill_us < 60_000_000
    assert 0 < timing.decode_us < 60_000_000

    await gateway.tell(MODEL, heartbeat.worker, CheckIntegrity(token="asked"))
    found = await heartbeat_where(gateway, lambda beat: beat.integrity is not None, 10)
    assert found.integrity is not None
    assert (found.integrity.token, found.integrity.problems) == ("asked", [])

    used = psutil.Process(process.pid).cpu_times()
    await asyncio.sleep(4)
    after = psutil.Process(process.pid).cpu_times()
    seconds = after.user + after.system - used.user - used.system
    assert seconds < 0.08, "an idle worker takes next to no processor time"


@pytest.mark.slow
async def test_a_cancelled_request_leaves_the_worker_within_a_second(
    start: Start, gateway: GatewayBroker
) -> None:
    start()
    await is_ready(gateway)
    stream = await gateway.submit(gateway.prepare(asked("long", 8000)))
    await anext(stream)
    await heartbeat_where(gateway, lambda heartbeat: heartbeat.num_running == 1, 5)
    await stream.cancel()
    cancelled = time.monotonic()
    await heartbeat_where(gateway, lambda heartbeat: heartbeat.num_running == 0, 5)
    assert time.monotonic() - cancelled < 1.5


@pytest.mark.slow
async def test_sigterm_lets_what_runs_finish_and_gives_back_the_rest(
    start: Start, gateway: GatewayBroker
) -> None:
    process = start()
    await is_ready(gateway)
    stream = await gateway.submit(gateway.prepare(asked("running", 1500)))
    first = await anext(stream)
    process.send_signal(signal.SIGTERM)
    await heartbeat_where(gateway, lambda heartbeat: heartbeat.state == "draining", 5)
    late = await gateway.submit(gateway.prepare(asked("late", 5)))
    rest = [frame async for frame in stream]
    assert len(tokens_of([first, *rest])) == 1500
    assert await asyncio.to_thread(process.wait, 20) == 0
    start()  # the next worker finds what the first one did not take
    async with asyncio.timeout(START_S):
        assert len(tokens_of([frame async for frame in late])) == 5


@pytest.mark.slow
async def test_a_second_signal_ends_the_worker_at_once(
    start: Start, gateway: GatewayBroker
) -> None:
    process = start()
    await is_ready(gateway)
    stream = await gateway.submit(gateway.prepare(asked("endless", 8000)))
    await anext(stream)
    process.send_signal(signal.SIGTERM)
    await heartbeat_where(gateway, lambda heartbeat: heartbeat.state == "draining", 5)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 3) == -signal.SIGTERM


@pytest.mark.slow
async def test_a_worker_ends_when_its_supervisor_is_killed(
    start: Start, gateway: GatewayBroker
) -> None:
    spawner = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    supervisor = start(prefix=(sys.executable, "-c", spawner))
    heartbeat = await is_ready(gateway)
    worker = psutil.Process(heartbeat.pid)
    supervisor.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(worker.wait, 10)
    assert not worker.is_running()


@pytest.mark.slow
async def test_a_killed_rank_ends_its_worker_and_another_goes_on_with_the_answer(
    start: Start, gateway: GatewayBroker, checkpoint: Path
) -> None:
    worker = start((), "--tensor-parallel", "2")
    heartbeat = await is_ready(gateway)
    assert heartbeat.load_report.startswith("fused; shared by 2 ranks")
    stream = await gateway.submit(gateway.prepare(asked("shared", 400)))
    frames = [await anext(stream)]
    children = psutil.Process(worker.pid).children()
    [follower] = [each for each in children if "engine.parallel.follower" in each.cmdline()]
    follower.kill()
    assert await asyncio.to_thread(worker.wait, 20) == 1
    start()
    async with asyncio.timeout(START_S):
        frames += [frame async for frame in stream]
    assert tokens_of(frames) == generated(checkpoint, [PROMPT], 400)[0]
