"""The one place that knows whether Triton is installed: kernel files import without it.

Triton has no wheel for macOS or arm64 and the CPU install leaves it out. A kernel file writes

    from kernels.triton_support import jit, tl

and decorates with `@jit`. Parameters are annotated `tl.tensor` or `tl.constexpr`: Triton resolves
annotations and refuses names that are not its own. Without Triton the decorated name still exists
and says so when launched; the public calls ask `runs_triton(x)` first and never get there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

__all__ = ["HAS_TRITON", "Kernel", "cdiv", "jit", "next_power_of_2", "tl"]

HAS_TRITON = triton is not None


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


def runs_triton(x: torch.Tensor) -> bool:
    """Whether operations on `x` go to Triton kernels."""
    return HAS_TRITON and x.is_cuda


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n: block shapes must be powers of two."""
    return 1 << max(n - 1, 0).bit_length()
