"""The GPU's runner with the very kernels that it launches there, interpreted: the CPU's answers."""

from pathlib import Path

import pytest
import torch

from engine.device import device_runner
from engine.device.device_runner import DeviceRunner, RunnerLimits
from engine.engine import Engine
from engine.messages import Sampling
from engine.model_runner import ModelRunner
from engine.models.decoder import load_decoder
from engine.sampler import LogprobColumns
from engine.settings import EngineSettings
from kernels import triton_support
from kernels.kv_cache import FLOAT8
from kernels.triton_support import runs_triton
from tests.engine.device.recording_device import RecordingDevice, SyncWatch
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny

NUM_BLOCKS = 8
SETTINGS = EngineSettings(max_running=2, max_step_tokens=64, kept_slots_share=0)
LIMITS = RunnerLimits(NUM_BLOCKS, SETTINGS.max_running, SETTINGS.max_step_tokens)
PROMPTS = ([7, 3, 11, *range(20, 35)], [5, 9, 14])


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "gpu_capability", lambda device: None)
    triton_support._accepts.cache_clear()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 40}
    save_tiny("LlamaConfig", tmp_path, **shape, num_key_value_heads=1, max_position_embeddings=128)
    return tmp_path


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8])
def test_its_tokens_and_logprobs_are_those_of_plain_torch(
    kv_dtype: torch.dtype | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(directory, torch.float32, torch.device("cpu"), kv_dtype=kv_dtype)
    if kv_dtype is not None:  # compiling beforehand gains nothing here, and takes long: once
        monkeypatch.setattr(device_runner, "warm_up", lambda *arguments, **options: None)
    runner = DeviceRunner(decoder, RecordingDevice(), LIMITS)
    workspace = runner._decode_buffers._workspace
    captured = (workspace.partials(0).data_ptr(), workspace.arrivals(0).data_ptr())
    assert workspace.partials(0).numel() == 2 * 2 * (16 + 2), "two sequences of two heads"
    ahead = Driver(Engine(runner, SETTINGS, NUM_BLOCKS))
    requests = [
        request("told", PROMPTS[0], 5, sampling=Sampling(temperature=0, num_logprobs=2)),
        request("drawn", PROMPTS[1], 4, sampling=Sampling(temperature=0.9, top_p=0.9, seed=5)),
    ]
    found = ahead.generate(requests)
    assert (workspace.partials(0).data_ptr(), workspace.arrivals(0).data_ptr()) == captured
    without_triton(monkeypatch)
    assert not runs_triton(torch.zeros(1))
    plain = Driver(Engine(ModelRunner(decoder, NUM_BLOCKS), SETTINGS, NUM_BLOCKS))
    assert found == plain.generate(requests)
    pairs = zip(*(run.received["told", 0].logprobs for run in (ahead, plain)), strict=True)
    for ours, theirs in pairs:
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_logprobs_are_looked_up_by_the_kernel_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(5, 90)
    tokens, rows = torch.tensor([3, -1, 89, 0, 7]), torch.tensor([0, 1, 4])
    with SyncWatch() as watch:
        found = LogprobColumns.of(logits, tokens, rows, 4)
    asked = [name for name in watch.found if name in {"topk", "log_softmax", "nonzero", "item"}]
    assert asked == []
    without_triton(monkeypatch)
    expected = LogprobColumns.of(logits, tokens, rows, 4)
    every = logits.log_softmax(dim=-1)
    assert torch.equal(expected.chosen, every[[0, 1, 4], [3, 0, 7]]), "bit for bit as before"
    assert torch.equal(expected.top, every[[0, 1, 4]].topk(4).values)
    torch.testing.assert_close(found.chosen, expected.chosen, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(found.top, expected.top, atol=2e-6, rtol=1e-6)
    assert torch.equal(found.top_ids, expected.top_ids)
