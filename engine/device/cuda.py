"""The GPU itself. See `engine.device.device` for what each call promises.

Never run on hardware so far: the development machines have no GPU. What its users rely on is proved
with a device that keeps account (tests/engine/device).
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.device.device import Captured, DeviceMemory, Event

WARM_UPS = 2
"""Runs before a capture: the first compiles Triton's kernels, the second finds all in place."""


class CudaDevice:
    """One CUDA GPU and its current stream."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        # All graphs share their memory: only one of them runs at a time.
        self._pool: Any = None

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return self._device

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See Device."""
        destination.copy_(source, non_blocking=True)

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See Device."""
        destination.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        """See Device."""
        return _CudaEvent(self._device)

    def capture(self, run: Callable[[], torch.Tensor]) -> Captured:
        """See Device."""
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's gap
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker go on with their own models meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return Captured(graph, output)

    def memory(self) -> DeviceMemory:
        """See Device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(free_bytes, total_bytes)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """See Device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()  # what the allocator keeps would not count as free
        return peak


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()
