"""Calibrations on disk: a worker that starts again on the same machine need not measure again.

One small file for each combination of what the figures depend on: the weights, the precision, the
device, its threads, and the libraries that compute. Anything else wrong with a file means that it
is measured anew.
"""

import hashlib
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
import torch

from kernels import __version__ as kernels_version

logger = structlog.get_logger(__name__)

FORM = "roofline-1"
"""Changes with the form of the cost model or the way it is measured."""
LIBRARIES = ("torch", "triton", "numpy")

Figures = TypeVar("Figures", bound=msgspec.Struct)


def remembered(
    cache: Path, fingerprint: list[str], kind: type[Figures], measure: Callable[[], Figures]
) -> tuple[Figures, bool]:
    """What is remembered under `fingerprint`, else what is measured now. (figures, was remembered)"""
    digest = hashlib.sha256(msgspec.json.encode(fingerprint)).hexdigest()[:32]
    path = cache / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind), True
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as fault:
        logger.warning("calibration is not readable", path=str(path), reason=str(fault))
    figures = measure()
    _write(path, figures)
    return figures, False


def fingerprint(
    directory: Path, *, dtype: torch.dtype, device: torch.device, num_threads: int, kernels: str
) -> list[str]:
    """Everything that a model's steps depend on. `kernels` names the build of the compiled ones."""
    return [
        FORM,
        *weight_files(directory),
        str(dtype),
        *machine_facts(device, num_threads, kernels),
    ]


def weight_files(directory: Path) -> list[str]:
    """The files of a checkpoint: another size or time makes it another one."""
    return sorted(
        f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}"
        for path in directory.iterdir()
        if path.is_file()
    )


def machine_facts(device: torch.device, num_threads: int, kernels: str) -> list[str]:
    """What computes here."""
    return [
        _device_name(device),
        f"threads {num_threads}",
        f"kernels {kernels_version} {kernels}",
        *(f"{name} {_version(name)}" for name in LIBRARIES),
    ]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _write(path: Path, figures: msgspec.Struct) -> None:
    """Whole or not at all: two workers may start at once. A full disk costs only the memory of it."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(figures))
        partial.replace(path)
    except OSError as fault:
        logger.warning("calibration is not kept", path=str(path), reason=str(fault))
