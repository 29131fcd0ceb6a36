"""What a device can do at best, measured with torch's own copy and GEMM, and how to compare."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COPY_BYTES = 256 << 20  # well beyond the caches
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second of a copy, read and written both counted, and GEMM operations per second."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, num_bytes: float, num_operations: float) -> float:
        """The time that this traffic and arithmetic take at least, when they overlap."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and in which type a benchmark runs, and the limits there."""

    device: torch.device
    dtype: torch.dtype
    limits: Limits

    def report(
        self, name: str, call: Callable[[], object], *, num_bytes: float, num_operations: float = 0
    ) -> None:
        """Time one call and print it as a fraction of the limit."""
        seconds = median_seconds(call, self.device)
        fraction = self.limits.seconds(num_bytes, num_operations) / seconds
        print(f"{name:34} {seconds * 1e6:10.1f} us {100 * fraction:6.1f} % of the limit")


def open_setting(description: str | None) -> Setting:
    """Read --device, --dtype and --threads, measure the limits and print them."""
    parser = argparse.ArgumentParser(description=description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    limits = measure_limits(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, {arguments.dtype}, {torch.get_num_threads()} threads: copy "
        f"{limits.bytes_per_s / 1e9:.1f} GB/s, GEMM {limits.operations_per_s / 1e9:.0f} GFLOP/s"
    )
    return Setting(device, dtype, limits)


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Copy a large buffer and multiply two large matrices."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = median_seconds(lambda: a @ b, device)
    return Limits(2 * COPY_BYTES / copy_s, 2 * size**3 / product_s)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of REPEATS calls after a warm one, launch and synchronisation included."""
    with torch.inference_mode():
        call()
        times = sorted(_once(call, device) for _ in range(REPEATS))
    return times[len(times) // 2]


def _once(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
