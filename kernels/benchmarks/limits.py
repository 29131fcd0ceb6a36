"""What a device can do at best, measured with torch's own copy and GEMM, and how to compare."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.benchmarks.launches import Launch

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
class Row:
    """One measured launch."""

    name: str
    seconds: float
    fraction: float
    """Of what the limits allow."""
    target: float | None
    """Least fraction that it should reach."""

    @property
    def is_missed(self) -> bool:
        """Whether it has a target and is below it."""
        return self.target is not None and self.fraction < self.target


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and in which type a benchmark runs, the limits there, and what was measured so far."""

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    rows: list[Row] = field(default_factory=list)

    def report(
        self,
        name: str,
        call: Callable[[], object],
        launch: Launch,
        *,
        target: float | None = None,
    ) -> float:
        """Time one call and print it as a fraction of the limit; its seconds.

        A target counts on a GPU alone.
        """
        seconds = median_seconds(call, self.device)
        fraction = self.limits.seconds(launch.num_bytes, launch.num_operations) / seconds
        row = Row(name, seconds, fraction, target if self.device.type == "cuda" else None)
        self.rows.append(row)
        verdict = "" if row.target is None else f" (target {100 * row.target:.0f} %)"
        verdict += "  MISSED" if row.is_missed else ""
        print(f"{name:46} {seconds * 1e6:10.1f} us {100 * fraction:6.1f} % of the limit{verdict}")
        return seconds


def open_setting(description: str | None) -> Setting:
    """Read --device, --dtype and --threads, measure the limits and print them."""
    parser = argparse.ArgumentParser(description=description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return measured_setting(torch.device(arguments.device), DTYPES[arguments.dtype])


def measured_setting(device: torch.device, dtype: torch.dtype) -> Setting:
    """The device with its limits, which are printed."""
    limits = measure_limits(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, {dtype}, {torch.get_num_threads()} threads: copy "
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
    """Median of REPEATS calls after a warm one: launch and synchronisation included on the CPU.

    On a GPU the device's own clock tells, each call behind a write that empties the caches.
    """
    with torch.inference_mode():
        call()
        if device.type == "cuda":
            return _median_device_seconds(call, device)
        times = sorted(_once(call) for _ in range(REPEATS))
    return times[len(times) // 2]


def _once(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _median_device_seconds(call: Callable[[], object], device: torch.device) -> float:
    flush = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(REPEATS):
        flush.zero_()
        before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize(device)
    times = sorted(before.elapsed_time(after) / 1e3 for before, after in pairs)
    return float(times[len(times) // 2])
