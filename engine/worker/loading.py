"""From a directory and the settings to an engine that is ready to run."""

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.costs.calibration import ALONE, fit_cost_model, warm_up
from engine.costs.calibration_cache import fingerprint, remembered
from engine.device.device import Device
from engine.engine import Engine
from engine.errors import ModelRefused
from engine.flight import Runner
from engine.memory.footprint import read_footprint
from engine.memory.memory_budget import free_bytes
from engine.memory.pool_warmer import PoolWarmer
from engine.messages import CostModel
from engine.models.choice import load_model
from engine.models.model import KVBlocks, Model
from engine.models.report import FUSED, LoadReport
from engine.models.text_files import has_chat_template, refuse_without_tokenizer
from engine.parallel.leader import load_leading
from engine.pooling import Pooling, read_pooling
from engine.settings import EngineSettings
from engine.simulator.policies import POLICIES
from engine.worker.machine import DTYPES, device_of, kernels_name, num_threads, with_dtype
from engine.worker.runners import capacity_of, create_runner, gpu_for
from kernels.cpu import library
from kernels.kv_cache import PagedKVCache

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it says of itself."""

    engine: Engine
    report: LoadReport
    dtype: str
    num_torch_threads: int
    """What plain torch is to compute its steps with."""


def load_engine(
    directory: Path,
    settings: EngineSettings,
    *,
    pool_bytes: int | None = None,
    alone: AbstractContextManager[None] = ALONE,
    gpu: Device | None = None,
) -> LoadedEngine:
    """Load the weights, size the KV cache, calibrate. Raises ModelRefused with the reason.

    `pool_bytes` bounds the KV cache; None: a share of what is free. Where other models run in this
    process, `alone` is entered for each measurement. `gpu` runs the steps; None: the machine's own,
    where it has one that can.
    """
    refuse_without_tokenizer(directory)
    device = device_of(settings)
    # Beside the compiled kernels, whose own threads do the work, torch's threads only disturb: one
    # made decode steps 26 % shorter at batch 8, 12 % at 64, and prefill 4 % (two cores, bf16).
    torch.set_num_threads(1 if library.active() else num_threads(settings))
    pooling = read_pooling(directory)
    if pooling is not None:
        return _load_pooled(directory, pooling, settings, device, alone)
    settings = with_dtype(settings)
    dtype = DTYPES[settings.dtype]
    if settings.quantization != "none" and (device.type != "cpu" or library.active() is None):
        raise ModelRefused(
            "quantised weights need the compiled CPU kernels", setting="quantization"
        )
    model, report = _load_model(directory, dtype, device, settings)
    if not report.is_fused:  # there torch computes the products
        torch.set_num_threads(num_threads(settings))
    if pool_bytes is None:
        pool_bytes = _pool_bytes(settings, device)
    gpu = gpu or gpu_for(device, report, settings)
    runner, capacity = create_runner(model, gpu, settings, pool_bytes)
    settings = settings.model_copy(update={"max_running": capacity.max_running})
    report = replace(report, has_chat_template=has_chat_template(directory))
    machine = _Machine(directory, device, settings, alone, gpu)
    return machine.engine(runner, runner.kv_cache, capacity.num_blocks, report)


def _load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, settings: EngineSettings
) -> tuple[Model, LoadReport]:
    if settings.tensor_parallel == 1:
        return load_model(
            directory,
            dtype,
            device,
            settings.quantization,
            verify_fused=settings.verify_fused,
            cache=settings.calibration_cache,
            is_kv_float8=settings.kv_cache_dtype == "fp8",
        )
    if settings.quantization != "none":
        raise ModelRefused("quantised weights cannot be shared by several ranks yet")
    if settings.kv_cache_dtype == "fp8":
        raise ModelRefused(
            "an 8-bit KV cache cannot be shared by several ranks yet", setting="kv_cache_dtype"
        )
    model = load_leading(directory, dtype, device, settings.tensor_parallel)
    return model, LoadReport(FUSED, num_ranks=settings.tensor_parallel)


def _load_pooled(
    directory: Path,
    pooling: Pooling,
    settings: EngineSettings,
    device: torch.device,
    alone: AbstractContextManager[None],
) -> LoadedEngine:
    """An engine of vectors, in fp32 whatever the settings say of models that write.

    Vectors are kept for years, and compared with those that other machines computed. Unless told
    otherwise one core is left alone: torch's threads wait for each other at every operation, and on
    two busy cores an input of 16 tokens took 400 ms with two threads and 40 ms with one (idle: 12
    and 10; all-MiniLM-L6-v2).
    """
    threads = settings.num_threads or max(1, num_threads(settings) - 1)
    fixed = {"dtype": "fp32", "quantization": "none", "num_threads": threads}
    settings = settings.model_copy(update=fixed)
    torch.set_num_threads(threads)
    loading = importlib.import_module("engine.models.pooled_loading")  # takes seconds
    model, report = loading.load_pooled(directory, pooling, device)
    runner = importlib.import_module("engine.pooling_runner").PoolingRunner(model)
    num_blocks = capacity_of(model.spec, settings, 0).num_blocks
    machine = _Machine(directory, device, settings, alone, gpu=None)
    return machine.engine(runner, runner.kv_cache, num_blocks, report)


@dataclass(frozen=True, slots=True)
class _Machine:
    """Where a model was loaded, and how."""

    directory: Path
    device: torch.device
    settings: EngineSettings
    alone: AbstractContextManager[None]
    gpu: Device | None

    def engine(
        self,
        runner: Runner,
        kv_cache: KVBlocks,
        num_blocks: int,
        report: LoadReport,
    ) -> LoadedEngine:
        """Calibrate, and make the engine."""
        settings, model, alone = self.settings, runner.model, self.alone
        report = replace(report, unpacked=_unpacked(self.directory, settings.dtype))
        cost_model, is_remembered = remembered(
            settings.calibration_cache,
            fingerprint(
                self.directory,
                dtype=DTYPES[settings.dtype],
                device=self.device,
                num_threads=num_threads(settings),
                kernels=f"{kernels_name()}, quantization {settings.quantization}"
                + (", 8-bit KV cache" if settings.kv_cache_dtype == "fp8" else "")
                + (", graphs" if self.gpu else "")
                + (f", {settings.tensor_parallel} ranks" if settings.tensor_parallel > 1 else ""),
            ),
            CostModel,
            lambda: fit_cost_model(model, kv_cache, num_blocks, alone=alone, gpu=self.gpu),
        )
        if is_remembered:
            warm_up(model, kv_cache, num_blocks, alone=alone)
        policy = POLICIES[settings.policy].plan
        engine = Engine(
            runner,
            settings,
            num_blocks,
            cost_model=cost_model,
            policy=policy,
            warmer=self._warmer(kv_cache, model),
        )
        return LoadedEngine(engine, report, settings.dtype, torch.get_num_threads())

    def _warmer(self, kv_cache: KVBlocks, model: Model) -> PoolWarmer | None:
        """Where the cache gets its memory only as it is written."""
        num_ahead = self.settings.kv_cache_ahead_mib * MIB // max(1, model.spec.bytes_per_block)
        if self.device.type != "cpu" or not isinstance(kv_cache, PagedKVCache) or not num_ahead:
            return None
        return PoolWarmer(kv_cache, num_ahead)


def _unpacked(directory: Path, dtype: str) -> str:
    """How the checkpoint's weights were packed; empty where they were plain."""
    footprint = read_footprint(directory, DTYPES[dtype].itemsize)
    return footprint.unpacked_notice(dtype)


def _pool_bytes(settings: EngineSettings, device: torch.device) -> int:
    """The KV cache of a model that has the machine to itself."""
    if settings.kv_cache_mib:
        return settings.kv_cache_mib * MIB
    if device.type != "cpu":
        return int(free_bytes(device) * settings.gpu_kv_cache_share)
    available = int(free_bytes(device) * settings.kv_cache_share)
    return min(available, settings.kv_cache_mib_max * MIB)
