"""What a worker finds out about its machine at its first start, and remembers for the next ones.

Which product of bf16 is faster and which precision: measured once for each build of the kernels. A
later start must not choose anew, not only because it takes a second and a half: measured beside a
busy neighbour the other choice may win, and with it a prompt's logits have other bits.
"""

import os

import msgspec
import torch

from engine.costs.calibration import choose_dtype
from engine.costs.calibration_cache import machine_facts, remembered
from engine.errors import ModelRefused
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.build import NATIVE, BuildResult

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DotChoice(msgspec.Struct, frozen=True):
    """How the compiled kernels multiply bf16."""

    native_bf16_dot: bool


class PrecisionChoice(msgspec.Struct, frozen=True):
    """In which precision models run where nobody says: a key of DTYPES."""

    dtype: str


def enable_kernels(settings: EngineSettings, target: tuple[str, ...] = NATIVE) -> BuildResult:
    """Use the compiled CPU kernels where there are any; plain torch computes otherwise."""
    built = library.build(settings.kernel_cache, target)
    if built.path is not None:
        path, threads = built.path, num_threads(settings)
        choice, is_remembered = remembered(
            settings.calibration_cache,
            ["bf16 dot", *machine_facts(torch.device("cpu"), threads, path.name)],
            DotChoice,
            lambda: DotChoice(library.enable(path, threads).uses_native_bf16_dot),
        )
        if is_remembered:
            library.enable(path, threads, choice.native_bf16_dot)
    return built


def with_dtype(settings: EngineSettings) -> EngineSettings:
    """The same settings with a precision: `auto` is measured, before anything else runs."""
    device = device_of(settings)
    if settings.dtype != "auto":
        return settings
    torch.set_num_threads(1 if library.active() else num_threads(settings))
    names = {dtype: name for name, dtype in DTYPES.items()}
    choice, _ = remembered(
        settings.calibration_cache,
        ["precision", *machine_facts(device, num_threads(settings), kernels_name())],
        PrecisionChoice,
        lambda: PrecisionChoice(names[choose_dtype(device)]),
    )
    return settings.model_copy(update={"dtype": choice.dtype})


def num_threads(settings: EngineSettings) -> int:
    """Compute threads: as configured, else one for each core that this process may use."""
    if settings.num_threads:
        return settings.num_threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kernels_name() -> str:
    """Which build of the compiled kernels computes, if one does."""
    compiled = library.active()
    return "plain torch" if compiled is None else compiled.path.name


def device_of(settings: EngineSettings) -> torch.device:
    """Where models run. Raises ModelRefused when it was asked for and is not there."""
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ModelRefused("NCOMPASS_ENGINE_DEVICE is cuda, but torch sees no CUDA device")
    return torch.device("cuda" if has_cuda and settings.device != "cpu" else "cpu")
