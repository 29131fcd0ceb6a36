"""Which runner computes a model's steps, and how much KV cache it gets."""

from dataclasses import dataclass

import structlog
import torch

from engine.device.cuda import CudaDevice
from engine.device.device import Device
from engine.device.device_runner import DeviceRunner, RunnerLimits
from engine.device.profile import kv_pool_bytes
from engine.errors import ModelRefused
from engine.model_runner import ModelRunner
from engine.models.model import Model, ModelSpec
from engine.models.report import LoadReport
from engine.scheduling.assembly import BLOCK_SIZE
from engine.settings import EngineSettings
from kernels.triton_support import HAS_TRITON

logger = structlog.get_logger(__name__)

MIB = 1024 * 1024
MIN_BLOCKS = 4
"""Fewer could not hold one short request."""
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model's engine may hold at once."""

    num_blocks: int
    max_running: int


def gpu_for(device: torch.device, report: LoadReport, settings: EngineSettings) -> Device | None:
    """The GPU that runs steps ahead of their results; None where they are waited for.

    A GPU that cannot is told of in one sentence; the model runs there by plain torch, slower.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    reason = why_not_ahead(name, capability, report, settings)
    if reason is None:
        return CudaDevice(device)
    logger.warning("no GPU graphs", reason=reason)
    return None


def why_not_ahead(
    name: str,
    capability: tuple[int, int],
    report: LoadReport,
    settings: EngineSettings,
) -> str | None:
    """One sentence that says why steps on this GPU are launched one by one; None if they are not."""
    if not settings.gpu_graphs:
        return "NCOMPASS_ENGINE_GPU_GRAPHS is off: every step is waited for"
    if not HAS_TRITON:
        return f"Triton is not installed: plain torch runs on the {name}, slower"
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        return (
            f"the {name} has compute capability {found} and the kernels need {least}: plain torch"
            " runs there, slower"
        )
    if report.num_ranks > 1:
        return "several ranks share the model: their steps are launched one by one"
    if not report.is_fused:
        return f"the model runs by transformers' own modules ({report.reason}), step by step"
    return None


def create_runner(
    model: Model, gpu: Device | None, settings: EngineSettings, pool_bytes: int
) -> tuple[ModelRunner | DeviceRunner, Capacity]:
    """The runner with its KV cache in `pool_bytes`, less where the GPU has less left.

    Raises ModelRefused where that is too little for one short request.
    """
    if gpu is None:
        capacity = capacity_of(model.spec, settings, pool_bytes)
        return ModelRunner(model, capacity.num_blocks), capacity
    pool_bytes = kv_pool_bytes(
        gpu,
        model,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        granted_bytes=pool_bytes,
    )
    capacity = capacity_of(model.spec, settings, pool_bytes)
    limits = RunnerLimits(capacity.num_blocks, capacity.max_running, settings.max_step_tokens)
    return DeviceRunner(model, gpu, limits), capacity


def capacity_of(spec: ModelSpec, settings: EngineSettings, available: int) -> Capacity:
    """(blocks, running sequences) for `available` bytes.

    States of a fixed size may take half of it; where blocks cost nothing, the contexts of all
    running sequences are the limit.
    """
    max_running = settings.max_running
    if spec.bytes_per_sequence:
        max_running = min(max_running, available // 2 // spec.bytes_per_sequence)
    left = available - max_running * spec.bytes_per_sequence
    num_blocks = max_running * -(-spec.context_length // BLOCK_SIZE)
    if spec.bytes_per_block:
        num_blocks = left // spec.bytes_per_block
    if num_blocks < MIN_BLOCKS or max_running < 1:
        needed = MIN_BLOCKS * spec.bytes_per_block + 2 * spec.bytes_per_sequence
        raise ModelRefused(
            f"the KV cache needs at least {needed // MIB + 1} MiB, {available // MIB} are there"
        )
    return Capacity(num_blocks, max_running)
