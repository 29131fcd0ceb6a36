"""The GPU's runner over a device that keeps account: the CPU's answers, and no waiting for them."""

from pathlib import Path

import pytest
import torch

from engine.device.decode_graphs import decode_buckets
from engine.device.device_runner import DeviceRunner, RunnerLimits
from engine.engine import Engine
from engine.messages import Sampling
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder, load_decoder
from engine.models.report import FUSED, LoadReport
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from engine.worker.runners import why_not_ahead
from kernels.cpu import library
from tests.engine.device import graph_kernels
from tests.engine.device.recording_device import RecordingDevice, SyncWatch
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny

NUM_BLOCKS = 40
MAX_RUNNING = 12
SETTINGS = EngineSettings(max_running=MAX_RUNNING, max_step_tokens=256, kept_slots_share=0)
PROMPTS = [[7 * i % 320, 3, 11, *range(20, 20 + 9 * i)] for i in range(1, 10)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", path)
    return path


@pytest.fixture
def decoder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(library, "active", lambda: None)
    graph_kernels.install(monkeypatch)
    return load_decoder(directory, torch.float32, torch.device("cpu"))


def on_device(decoder: Decoder, device: RecordingDevice) -> Driver:
    limits = RunnerLimits(NUM_BLOCKS, MAX_RUNNING, SETTINGS.max_step_tokens)
    return Driver(Engine(DeviceRunner(decoder, device, limits), SETTINGS, NUM_BLOCKS))


def plain(decoder: Decoder) -> Driver:
    return Driver(Engine(ModelRunner(decoder, NUM_BLOCKS), SETTINGS, NUM_BLOCKS))


def test_its_greedy_tokens_are_those_of_the_plain_runner(decoder: Decoder) -> None:
    requests = [request(f"r{i}", prompt, 40 + i) for i, prompt in enumerate(PROMPTS)]
    device = RecordingDevice()
    run = on_device(decoder, device)
    assert run.generate(requests) == plain(decoder).generate(requests)
    assert device.num_replays > 30, "most steps were graphs"
    assert run.engine.stats.free_kv_tokens == NUM_BLOCKS * 64


def test_draws_logprobs_choices_penalties_and_prompts_are_those_of_the_plain_runner(
    decoder: Decoder,
) -> None:
    drawn = Sampling(temperature=0.9, seed=5, top_p=0.9, num_logprobs=3)
    requests = [
        request("drawn", PROMPTS[0], 30, sampling=drawn),
        request("many", PROMPTS[1], 20, sampling=Sampling(temperature=1.0, seed=9), num_choices=3),
        request("greedy", PROMPTS[2], 50, sampling=Sampling(temperature=0, num_logprobs=0)),
        request("told", PROMPTS[3], 5, sampling=Sampling(temperature=0, num_prompt_logprobs=2)),
        request("kept", PROMPTS[4], 20, sampling=Sampling(temperature=0, frequency_penalty=0.7)),
    ]
    runs = [on_device(decoder, RecordingDevice()), plain(decoder)]
    for run in runs:
        run.generate(requests)
    of_device, of_plain = (run.received for run in runs)
    assert of_device.keys() == of_plain.keys()
    for key, received in of_device.items():
        assert received.token_ids == of_plain[key].token_ids
        assert [each.prompt_logprobs for each in received.frames] == [
            each.prompt_logprobs for each in of_plain[key].frames
        ] or key[0] == "told"
        for ours, theirs in zip(received.logprobs, of_plain[key].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    told = [run.received["told", 0].prompt_logprobs for run in runs]
    assert sum(each.num_tokens for each in told[0]) == sum(each.num_tokens for each in told[1])


def test_a_steady_decode_step_is_one_graph_and_the_host_waits_only_for_the_step_before(
    decoder: Decoder,
) -> None:
    device = RecordingDevice()
    run = on_device(decoder, device)
    for index, prompt in enumerate(PROMPTS[:5]):
        run.add(request(f"r{index}", prompt, 60))
    for _ in range(6):
        run.step()
    memory = addresses(run)
    before = (device.num_captures, device.num_pinned, device.num_replays, device.num_waits)
    num_told = run.engine.stats.output_tokens_total
    with SyncWatch() as watch:
        for _ in range(20):
            run.step()
    captures, pinned, replays, waits = before
    assert watch.found == [], "the host waited inside of a step"
    assert device.num_replays - replays == 20, "one graph a step"
    assert device.num_waits - waits == 20, "one wait a step, for the one before it"
    assert device.replayed[-20:] == [8] * 20, "five sequences run in the graph of eight"
    assert (device.num_captures, device.num_pinned) == (captures, pinned)
    assert addresses(run) == memory, "nothing was allocated anew"
    assert run.engine.stats.output_tokens_total - num_told == 20 * 5


def addresses(run: Driver) -> list[int]:
    """Of all tensors that the runner keeps."""
    runner = run.engine._runner
    assert isinstance(runner, DeviceRunner)
    buffers = [runner._decode_buffers, runner._step_buffers]
    tensors = [runner._last_tokens, *(pinned for pinned, _ in runner._told)]
    for each in buffers:
        tensors += [each._packed, each._tables]
        tensors += [tensor for side in each._sides for tensor in (side.packed, side.tables)]
    tensors += [captured.output for captured in runner._graphs._captured.values()]
    return [tensor.data_ptr() for tensor in tensors]


def test_prompts_join_without_a_wait_as_well(decoder: Decoder) -> None:
    device = RecordingDevice()
    run = on_device(decoder, device)
    run.add(request("first", PROMPTS[0], 60))
    for _ in range(4):
        run.step()
    run.add(request("second", PROMPTS[8], 20))
    num_replays = device.num_replays
    with SyncWatch() as watch:
        run.step()  # the prompt, with a decode in the same step
        run.step()
    assert watch.found == []
    assert device.num_replays - num_replays == 1
    run.run()
    expected = plain(decoder).generate(
        [request("first", PROMPTS[0], 60), request("second", PROMPTS[8], 20)]
    )
    assert [run.received[name, 0].token_ids for name in ("first", "second")] == expected


def test_a_whole_engine_is_loaded_onto_a_device(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the worker does it: profile, cache, graphs, calibration, steps."""
    monkeypatch.setattr(library, "active", lambda: None)
    graph_kernels.install(monkeypatch)
    settings = EngineSettings(
        device="cpu",
        dtype="fp32",
        max_running=4,
        max_step_tokens=256,
        calibration_cache=tmp_path,
        gpu_kv_cache_share=0.5,
    )
    device = RecordingDevice(free_bytes=(1 << 20) + 10 * 2 * 3 * 2 * 64 * 16 * 4)
    loaded = load_engine(directory, settings, pool_bytes=1 << 30, gpu=device)
    total = loaded.engine.stats.total_kv_tokens
    assert total == 9 * 64, "of 10 blocks beside the largest step 5 % are kept"
    run = Driver(loaded.engine)
    decoder = load_decoder(directory, torch.float32, torch.device("cpu"))
    requests = [request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS[:4])]
    assert run.generate(requests) == plain(decoder).generate(requests)
    assert device.num_replays > 0


@pytest.mark.parametrize(
    ("capability", "tier", "graphs", "sentence"),
    [
        ((9, 0), FUSED, True, None),
        ((7, 5), FUSED, True, "the T4 has compute capability 7.5 and the kernels need 8.0: plain"),
        ((9, 0), "own cache", True, "the model runs by transformers' own modules (why), step"),
        ((9, 0), FUSED, False, "NCOMPASS_ENGINE_GPU_GRAPHS is off: every step is waited for"),
    ],
)
def test_a_gpu_that_cannot_run_ahead_is_told_of_in_one_sentence(
    capability: tuple[int, int],
    tier: str,
    graphs: bool,
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where torch has no CUDA our kernels leave Triton alone, even where it is installed.
    monkeypatch.setattr("engine.worker.runners.HAS_TRITON", True)
    report = LoadReport(tier, "why")
    settings = EngineSettings(gpu_graphs=graphs)
    reason = why_not_ahead("T4", capability, report, settings)
    assert reason is None if sentence is None else (reason or "").startswith(sentence)


def test_the_watch_sees_what_a_gpu_would_wait_for() -> None:
    x = torch.arange(6.0)
    with SyncWatch() as watch:
        x.sum().item()
        bool(x.any())
        x[x > 2]
        x.tolist()
        x.nonzero()
        torch.tensor([1])
        x.index_select(0, torch.arange(2))
    assert len(watch.found) == 6, watch.found


def test_copies_that_are_not_there_yet_are_noticed() -> None:
    device = RecordingDevice()
    pinned = device.pinned((3,), torch.int64)
    device.download(pinned, torch.tensor([1, 2, 3]))
    mark = device.mark()
    assert pinned.tolist() == [-77] * 3
    mark.wait()
    assert pinned.tolist() == [1, 2, 3]
    device.upload(torch.zeros(3, dtype=torch.int64), pinned)
    mark = device.mark()
    pinned[0] = 9
    with pytest.raises(AssertionError, match="changed before it was copied"):
        mark.wait()


@pytest.mark.parametrize("most", [1, 3, 8, 100, 128, 129, 256, 1000])
def test_every_batch_has_a_graph_and_few_rows_are_computed_in_vain(most: int) -> None:
    buckets = decode_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        bucket = next(each for each in buckets if each >= size)
        assert bucket - size < (8 if size <= 128 else 32)


def test_a_batch_that_grows_and_shrinks_takes_the_smallest_graph_that_holds_it(
    decoder: Decoder,
) -> None:
    device = RecordingDevice()
    run = on_device(decoder, device)
    requests = [request(f"r{i}", prompt, 10 + 8 * i) for i, prompt in enumerate(PROMPTS)]
    run.generate(requests)
    assert set(device.replayed) == {1, 2, 4, 8, 12}
    assert device.num_captures == len(decode_buckets(MAX_RUNNING))
