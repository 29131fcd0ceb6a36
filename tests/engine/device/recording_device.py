"""A device that computes on the CPU, at once, and keeps account of what a GPU would have been asked.

It is as forgetful as a GPU is late: what is copied to the host is not there before its event is waited
for, and what is copied from the host must not have changed by then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.device.device import Captured, DeviceMemory, Event

CPU = torch.device("cpu")
NOT_YET = -77
"""What the host reads where it reads too early."""


@dataclass
class RecordingDevice:
    torch_device: torch.device = CPU
    free_bytes: int = 1 << 30
    num_captures: int = 0
    num_replays: int = 0
    num_uploads: int = 0
    num_pinned: int = 0
    num_waits: int = 0
    replayed: list[int] = field(default_factory=list)
    """Rows of the graphs, in the order of their replays."""
    uploads: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    downloads: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_pinned += 1
        return torch.zeros(shape, dtype=dtype)

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.num_uploads += 1
        destination.copy_(source)
        self.uploads.append((source, source.clone()))

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.downloads.append((destination, source.clone()))
        destination.fill_(NOT_YET)

    def mark(self) -> Event:
        event = RecordedEvent(self, self.uploads, self.downloads)
        self.uploads, self.downloads = [], []
        return event

    def capture(self, run: Callable[[], torch.Tensor]) -> Captured:
        self.num_captures += 1
        output = run().clone()
        return Captured(RecordedGraph(self, run, output), output)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free_bytes, 2 * self.free_bytes)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 1 << 20


class RecordedGraph:
    """Runs again what was captured: it must find its inputs, and leave its output, where they were."""

    def __init__(
        self, device: RecordingDevice, run: Callable[[], torch.Tensor], output: torch.Tensor
    ) -> None:
        self._device = device
        self._run = run
        self._output = output

    def replay(self) -> None:
        self._device.num_replays += 1
        self._device.replayed.append(len(self._output))
        self._output.copy_(self._run())


class RecordedEvent:
    def __init__(
        self,
        device: RecordingDevice,
        uploads: list[tuple[torch.Tensor, torch.Tensor]],
        downloads: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._device = device
        self._uploads = uploads
        self._downloads = downloads
        self._is_over = False

    def wait(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._device.num_waits += 1
        # What the device does by itself is nothing that the host waits for.
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for source, content in self._uploads:
                assert torch.equal(source, content), "changed before it was copied"
            for destination, content in self._downloads:
                destination.copy_(content)


SYNCHRONISING = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "masked_select",
    "unique",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
    "repeat_interleave",
}
"""Functions of torch for which the host waits, or whose result's shape it must hear of first."""


class SyncWatch(TorchFunctionMode):
    """Notes every call for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in SYNCHRONISING or _reads_a_mask(name, args):
            self.found.append(name)
        if name in {"tensor", "from_numpy", "as_tensor"}:
            self.found.append(f"{name}: a copy from pageable memory")
        return func(*args, **(kwargs or {}))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, traceback)


def _reads_a_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Indexing by booleans: how many are true decides the shape of the result."""
    if name not in {"__getitem__", "__setitem__"}:
        return False
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(key, torch.Tensor) and key.dtype == torch.bool for key in keys)
