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

import msgspec
import structlog
import torch

from engine.messages import CostModel
from kernels import __version__ as kernels_version

logger = structlog.get_logger(__name__)

FORM = "roofline-1"
"""Changes with the form of the cost model or the way it is measured."""
LIBRARIES = ("torch", "triton", "numpy")


def calibrated(
    cache: Path, fingerprint: list[str], measure: Callable[[], CostModel]
) -> tuple[CostModel, bool]:
    """The remembered cost model of `fingerprint`, else a measured one. (model, was remembered)"""
    digest = hashlib.sha256(msgspec.json.encode(fingerprint)).hexdigest()[:32]
    path = cache / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel), True
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as fault:
        logger.warning("calibration is not readable", path=str(path), reason=str(fault))
    cost_model = measure()
    _write(path, cost_model)
    return cost_model, False


def fingerprint(
    directory: Path, *, dtype: torch.dtype, device: torch.device, num_threads: int, kernels: str
) -> list[str]:
    """Everything that the figures depend on. `kernels` names the build of the compiled ones."""
    weights = sorted(
        f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}"
        for path in directory.iterdir()
        if path.is_file()
    )
    return [
        FORM,
        *weights,
        str(dtype),
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


def _write(path: Path, cost_model: CostModel) -> None:
    """Whole or not at all: two workers may start at once. A full disk costs only the memory of it."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(cost_model))
        partial.replace(path)
    except OSError as fault:
        logger.warning("calibration is not kept", path=str(path), reason=str(fault))
