"""The engine on a GPU: graphs and steps ahead give the tokens of the plain runner, and nothing waits."""

from pathlib import Path

import pytest
import torch

from engine.device.cuda import CudaDevice
from engine.device.device_runner import DeviceRunner, RunnerLimits
from engine.engine import Engine
from engine.messages import Sampling
from engine.model_runner import ModelRunner
from engine.models.decoder import load_decoder
from engine.parallel.leader import load_leading
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny

NUM_BLOCKS = 200
SETTINGS = EngineSettings(max_running=20, max_step_tokens=512)
PROMPTS = [[7 * i % 320, 3, *range(20, 20 + 17 * i)] for i in range(1, 17)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", path)
    return path


def drivers(directory: Path, device: torch.device) -> tuple[Driver, Driver]:
    model = load_decoder(directory, torch.float32, device)
    limits = RunnerLimits(NUM_BLOCKS, SETTINGS.max_running, SETTINGS.max_step_tokens)
    ahead = DeviceRunner(model, CudaDevice(device), limits)
    plain = ModelRunner(model, NUM_BLOCKS)
    first, second = (Driver(Engine(each, SETTINGS, NUM_BLOCKS)) for each in (ahead, plain))
    return first, second


def test_tokens_are_those_of_the_plain_runner(directory: Path, gpu: torch.device) -> None:
    ahead, plain = drivers(directory, gpu)
    requests = [request(f"r{i}", prompt, 60 + i) for i, prompt in enumerate(PROMPTS)]
    drawn = Sampling(temperature=0.8, top_p=0.95, seed=4, num_logprobs=2)
    requests.append(request("drawn", PROMPTS[3], 40, sampling=drawn))
    assert ahead.generate(requests) == plain.generate(requests)


def test_a_steady_step_never_waits_for_the_device(directory: Path, gpu: torch.device) -> None:
    ahead, _ = drivers(directory, gpu)
    for index, prompt in enumerate(PROMPTS):
        ahead.add(request(f"r{index}", prompt, 100))
    for _ in range(10):
        ahead.step()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            ahead.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    ahead.run()


def test_an_engine_is_loaded_as_the_worker_does_it(
    directory: Path, tmp_path: Path, gpu: torch.device
) -> None:
    settings = EngineSettings(
        device="cuda", max_step_tokens=512, max_running=16, calibration_cache=tmp_path
    )
    loaded = load_engine(directory, settings, pool_bytes=1 << 28)
    assert loaded.engine.stats.total_kv_tokens > 0
    answers = Driver(loaded.engine).generate([request("a", PROMPTS[0], 30)])
    assert len(answers[0]) == 30


def test_two_gpus_compute_what_one_does(directory: Path, gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    leading = load_leading(directory, torch.float32, torch.device("cuda", 0), 2)
    shared = Driver(Engine(ModelRunner(leading, NUM_BLOCKS), SETTINGS, NUM_BLOCKS))
    _, plain = drivers(directory, gpu)
    requests = [request(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    assert shared.generate(requests) == plain.generate(requests)
