"""A known machine is found again from its steps; what was measured once is not measured twice."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.costs.calibration import fit_cost_model
from engine.costs.calibration_cache import fingerprint, remembered
from engine.costs.cost_fit import MeasuredStep, fit_roofline, relative_errors
from engine.messages import CostModel, StepWork
from engine.models.decoder import load_decoder
from engine.models.model import ModelSpec
from engine.settings import EngineSettings
from engine.worker.machine import DTYPES, enable_kernels, with_dtype
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from kernels.cpu.library import CpuLibrary
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import built

H100 = CostModel(
    base_s=1.2e-3,
    per_token_s=24.7e-6,
    per_prefill_context_s=1.3e-9,
    per_decode_context_s=45e-9,
    weights_s=5.5e-3,
    overlap=1.0,
    per_sample_s=1e-6,
)
CPU = CostModel(
    base_s=2e-3,
    per_token_s=8e-4,
    per_prefill_context_s=3.5e-7,
    per_decode_context_s=1e-6,
    weights_s=1.1e-2,
    overlap=0.2,
    per_sample_s=4e-4,
)
LENGTHS = (16, 64, 256, 1024, 2048)
BATCHES = ((1, 64), (8, 64), (32, 64), (128, 64), (16, 1024), (64, 1024))


def works() -> list[StepWork]:
    prefills = [StepWork(num_tokens=n, num_samples=1, prefill_pairs=n * n / 2) for n in LENGTHS]
    chunk = StepWork(num_tokens=128, num_samples=1, prefill_pairs=128 * 512 + 128 * 64)
    decodes = [
        StepWork(num_tokens=n, num_samples=n, decode_context=float(n * context))
        for n, context in BATCHES
    ]
    return [*prefills, chunk, *decodes]


@pytest.mark.parametrize("machine", [H100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_steps_of_a_known_machine_give_its_model_back(machine: CostModel, noise: float) -> None:
    draw = random.Random(1)
    steps = [
        MeasuredStep(work, machine.step_s(work) * (1 + draw.uniform(-noise, noise)))
        for work in works()
    ]
    found = fit_roofline(steps, machine.weights_s)
    assert max(map(abs, relative_errors(found, steps))) < 0.03 + 2 * noise
    assert found.ridge_tokens == pytest.approx(machine.ridge_tokens, rel=0.05 + 3 * noise)
    assert found.per_token_s == pytest.approx(machine.per_token_s, rel=0.05 + 3 * noise)


def test_weights_that_never_leave_the_cache_do_not_take_longer_than_a_step() -> None:
    steps = [MeasuredStep(work, CPU.step_s(work)) for work in works()]
    found = fit_roofline(steps, 1.0)
    assert found.weights_s == min(step.seconds for step in steps)


def test_a_real_model_is_calibrated_in_seconds_and_every_factor_is_sound(tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    model = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert model.spec.weight_bytes > 0
    cost = fit_cost_model(model, model.create_kv_cache(300), 300)
    assert cost.per_token_s > 0
    assert 0 <= cost.overlap <= 1
    assert min(cost.base_s, cost.per_prefill_context_s, cost.per_decode_context_s) >= 0


def test_a_step_of_whole_prompts_costs_less_than_one_step_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("engine.costs.calibration.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("engine.costs.calibration._read_rate", lambda device: 1e10)

    class Whole:
        device = torch.device("cpu")
        spec = ModelSpec(vocab_size=10, context_length=257, bytes_per_block=0, shares_blocks=False)

        def forward(self, token_ids: Any, kv_cache: Any, metadata: Any, rows: Any) -> torch.Tensor:
            clock[0] += 5e-3 + 1e-4 * len(token_ids) + 1e-3 * len(rows)
            return torch.zeros(len(rows), 3)

    found = fit_cost_model(Whole(), None, 1_000)  # type: ignore[arg-type]  # keeps nothing
    one = found.step_s(StepWork(num_tokens=16, num_samples=1, prefill_pairs=128.0))
    many = found.step_s(StepWork(num_tokens=256, num_samples=16, prefill_pairs=2048.0))
    assert one == pytest.approx(7.6e-3, rel=0.1)
    assert many == pytest.approx(46.6e-3, rel=0.1)


def test_a_calibration_is_kept_until_what_it_depends_on_changes(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1")

    def of(num_threads: int) -> tuple[CostModel, bool]:
        depends_on = fingerprint(
            tmp_path,
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_threads=num_threads,
            kernels="build",
        )
        return remembered(tmp_path / "kept", depends_on, CostModel, lambda: CPU)

    assert of(1) == (CPU, False)
    assert of(1) == (CPU, True)
    assert of(2) == (CPU, False)
    (tmp_path / "weights").write_bytes(b"22")
    assert of(1) == (CPU, False)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"base_s": "x"}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    remembered(tmp_path, ["it"], CostModel, lambda: CPU)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(content)
    assert remembered(tmp_path, ["it"], CostModel, lambda: H100) == (H100, False)
    assert remembered(tmp_path, ["it"], CostModel, lambda: CPU) == (H100, True)


def test_where_nothing_can_be_written_the_worker_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert remembered(tmp_path / "file" / "below", ["it"], CostModel, lambda: CPU) == (CPU, False)


def test_the_machines_choices_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(calibration_cache=tmp_path, num_threads=2)
    first = with_dtype(settings)
    assert first.dtype in DTYPES
    monkeypatch.setattr("engine.worker.machine.choose_dtype", _must_not_run)
    assert with_dtype(settings) == first
    with pytest.raises(AssertionError, match="measured again"):
        with_dtype(settings.model_copy(update={"num_threads": 1}))


def test_a_later_start_multiplies_bf16_as_the_first_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = built(NATIVE).parent
    settings = EngineSettings(calibration_cache=tmp_path, kernel_cache=directory, num_threads=1)
    enable_kernels(settings)
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(CpuLibrary, "_is_native_dot_faster", _must_not_run)
    active = library.active()
    assert active is not None
    for is_native in {False, active.has_native_bf16_dot}:
        kept.write_text(f'{{"native_bf16_dot":{str(is_native).lower()}}}')
        enable_kernels(settings)
        active = library.active()
        assert active is not None
        assert active.uses_native_bf16_dot is is_native
    library.disable()


def _must_not_run(*_: object) -> object:
    raise AssertionError("measured again")
