"""The one place that knows whether Triton is there: kernel files import without it.

Triton has no wheel for macOS or arm64, and a torch that was built without CUDA has nothing to run it
on: there it is left alone, for it takes 80 MB of every process. Who compiles ahead of time or
interprets kernels on such a machine imports Triton before any file of ours. A kernel file writes

    from kernels.triton_support import jit, tl

and decorates with `@jit`. Parameters are annotated `tl.tensor` or `tl.constexpr`: Triton resolves
annotations and refuses names that are not its own. Without Triton the decorated name still exists
and says so when launched; the public calls ask `runs_triton(x)` first and never get there.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

try:
    if torch.version.cuda is None and torch.version.hip is None and "triton" not in sys.modules:
        raise ImportError("nothing here could run it")
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

__all__ = [
    "HAS_TRITON",
    "Float8",
    "Kernel",
    "cdiv",
    "float8_form",
    "gpu_capability",
    "jit",
    "kernel",
    "major_capability",
    "multiplies_float8",
    "next_power_of_2",
    "num_processors",
    "runs_triton",
    "tl",
    "why_not_triton",
]

HAS_TRITON = triton is not None
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)  # Ampere: tensor cores with bf16, asynchronous copies
FLOAT8_CAPABILITY = (8, 9)  # Ada: instructions that convert and multiply e4m3
# The imagined GPU on which the interpreter runs:
INTERPRETED_PROCESSORS = 2
INTERPRETED_CAPABILITY = (9, 0)
Float8 = Literal["none", "bits", "native"]
"""How a kernel reads 8-bit floats: there are none, by shifting bits, or by the GPU's instruction."""


class Kernel(Protocol):
    """A compiled function, launched over a grid: `kernel[(num_programs,)](arguments)`."""

    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *arguments: Any) -> Any:
        """Call it from another kernel."""


class _MissingKernel:
    """Stands where a kernel would be on a machine without Triton."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arg_names: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        raise RuntimeError(f"{self.name} needs Triton, which is not installed on this machine")

    def __call__(self, *arguments: Any) -> Any:
        raise RuntimeError(f"{self.name} needs Triton, which is not installed on this machine")


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile `function` with Triton, or leave a placeholder where there is no Triton."""
    if not HAS_TRITON:
        return _MissingKernel(function.__name__)
    kernel: Kernel = triton.jit(function)
    return kernel


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """As `jit`, of a kernel that is launched; `varying` names integers that differ between launches.

    For any other integer Triton compiles anew when it is 1, or a multiple of 16, for the first time:
    streams would wait for seconds whenever a batch has another size.
    """

    def compiled(function: Callable[..., Any]) -> Kernel:
        if not HAS_TRITON:
            return _MissingKernel(function.__name__)
        found: Kernel = triton.jit(function, do_not_specialize=list(varying))
        return found

    return compiled


def gpu_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def major_capability(device: torch.device) -> int:
    """The generation of a GPU, as far as kernels choose tiles by it."""
    return (gpu_capability(device) or INTERPRETED_CAPABILITY)[0]


def why_not_triton(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """One sentence that says why our kernels refuse a GPU or a data type; None if they do not."""
    if capability < MIN_CAPABILITY:
        return (
            "this GPU has compute capability {}.{} and the Triton kernels need {}.{} or later: "
            "plain torch operations run instead, slower"
        ).format(*capability, *MIN_CAPABILITY)
    if dtype not in DTYPES:
        return (
            f"the Triton kernels have no {str(dtype).removeprefix('torch.')}, only bfloat16, "
            "float16 and float32: plain torch operations run instead, slower"
        )
    return None


@functools.cache
def _accepts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device runs our kernels in `dtype`; says once why not."""
    capability = gpu_capability(device)
    if capability is None:
        return False
    if not HAS_TRITON:
        reason: str | None = "Triton is not installed: plain torch operations run instead, slower"
    else:
        reason = why_not_triton(capability, dtype)
    if reason is not None:
        logging.getLogger(__name__).warning("%s: %s", device, reason)
    return reason is None


def runs_triton(x: torch.Tensor) -> bool:
    """Whether operations on `x` go to Triton kernels."""
    return _accepts(x.device, x.dtype)


@functools.cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether 8-bit floats are multiplied on `device` as they are; says once why not."""
    capability = gpu_capability(device)
    if capability is None or capability >= FLOAT8_CAPABILITY:
        return True
    logging.getLogger(__name__).warning(
        "%s: this GPU has compute capability %d.%d and products of 8-bit floats need %d.%d or "
        "later: the weights are widened instead, slower",
        *(device, *capability, *FLOAT8_CAPABILITY),
    )
    return False


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a launch of that many programs fills it once."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def float8_form(dtype: torch.dtype, device: torch.device) -> Float8:
    """How kernels on `device` read a cache of `dtype`."""
    if dtype != torch.float8_e4m3fn:
        return "none"
    capability = gpu_capability(device)
    return "native" if capability is not None and capability >= FLOAT8_CAPABILITY else "bits"


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n: block shapes must be powers of two."""
    return 1 << max(n - 1, 0).bit_length()
