"""The C++ operations as Python functions over torch tensors, by plain pointers.

`enable` loads a built library for this process; from then on the public operations of `kernels`
use it for CPU tensors that it supports. A loaded library is a fact about the process, as torch's
own thread pool is, so it is kept here and not passed through every call.

Results do not depend on the batch: a token's hidden state and logits have the same bits alone or
beside others, prefilled whole or in chunks, on any number of threads (one build, one machine type).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Literal

import torch

from kernels.cpu.build import BuildResult, build
from kernels.cpu.memory import Arena

__all__ = ["BuildResult", "CpuLibrary", "PackedWeight", "active", "build", "disable", "enable"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
Quantization = Literal["none", "int8", "int8_weight_only"]
FORMS: dict[Quantization, int] = {"int8": 2, "int8_weight_only": 3}
"""Codes of quantised weights; the others have the code of their dtype."""
MAX_HEAD_DIM = 512
MEASUREMENT_S = 0.002
CHOICE_RUNS = 20
"""Between the ways to multiply bf16: spread over 80 ms, longer than a neighbour's time slice."""

_I, _P, _D = c_int64, c_void_p, c_int32
_SIGNATURES: dict[str, list[object]] = {
    "rms_norm": [_P, _I, _I, _P, _I, _D, _P, _I, _D, _P, _P, _D, c_float, _P],
    "silu_and_mul": [_P, _I, _I, _P, _I, _D, _P],
    "quantise": [_P, _I, _I, _I, _P, _I, _D, _P, _P],
    "pack": [_P, _I, _I, _P, _I, _P, _D, _P],
    "unpack_rows": [_P, _I, _I, _P, _D, _I, _P, _P],
    "gated_linear": [_P, _I, _I, _I, _P, _I, _D, _P, _P, _P, _P, _D, _P, _D],
    "decode": [_P, _P, _P],
    "linear": [_P, _I, _I, _I, _P, _I, _D, _P, _D, _P, _P, _I, _P, _D],
    "rotary_and_write_kv": [
        *[_P, _P, _P, _I, _I, _I, _D],
        *[_I, _I, _P, _I, _P, _I, _P, _I, _D, _P, _I, _I, _P, _P],
    ],
    "paged_attention": [
        *[_P, _P, _P, _I, _I, _I, _D],
        *[_I, _I, _P, _I, _D, _P, _I, _P, _P, _P, _I, c_float, _I, c_float],
    ],
    "sample": [_P, _I, _I, _P, _I, _D, _P, _P, _P, _P, _P, _P, _P],
    "measure_arithmetic": [_P, _D, c_double, POINTER(c_double)],
    "measure_read": [_P, _P, _I, POINTER(c_double)],
}


class CpuLibrary:
    """A loaded library with its team of threads. Calls from several threads take turns.

    `native_bf16_dot` says whether bf16 is multiplied by vdpbf16ps; None measures which way is
    faster. That instruction does two multiply-adds at full rate on Zen 4, and half of one on Intel
    cores whose AMX is hidden (86 against 176 GFLOP/s a core when measured).
    """

    def __init__(self, path: Path, num_threads: int, native_bf16_dot: bool | None = None) -> None:
        self.path = path
        """The shared object; its name says which sources and machine it was built for."""
        self._weights = Arena()
        self._library = ctypes.CDLL(str(path))
        self._functions = {name: self._bind(name) for name in _SIGNATURES}
        self._library.ncompass_packed_bytes.restype = c_int64
        self._library.ncompass_packed_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int32]
        self._library.ncompass_group_length.restype = c_int64
        self._library.ncompass_group_length.argtypes = [c_int32]
        self._library.ncompass_create.restype = c_void_p
        self._library.ncompass_destroy.argtypes = [c_void_p]
        self.num_threads = num_threads
        self.vector_width: int = self._library.ncompass_vector_width()
        self.has_native_bf16_dot = bool(self._library.ncompass_has_native_bf16_dot())
        self._context = self._create(is_native=False)
        if native_bf16_dot is None:
            native_bf16_dot = self.has_native_bf16_dot and self._is_native_dot_faster()
        self.uses_native_bf16_dot = native_bf16_dot
        if native_bf16_dot:
            assert self.has_native_bf16_dot, "this build has no native bf16 dot product"
            self.close()
            self._context = self._create(is_native=True)

    def _bind(self, name: str) -> Callable[..., bytes | None]:
        function = getattr(self._library, f"ncompass_{name}")
        function.argtypes = _SIGNATURES[name]
        function.restype = c_char_p
        called: Callable[..., bytes | None] = function
        return called

    def _create(self, *, is_native: bool) -> int:
        context: int | None = self._library.ncompass_create(self.num_threads, int(is_native))
        if context is None:
            raise RuntimeError("the CPU kernels could not start their threads")
        return context

    def call(self, name: str, *arguments: object) -> None:
        """One of its functions, over plain pointers.

        Raises ValueError where the arguments would have led outside an array.
        """
        reason = self._functions[name](self._context, *arguments)
        if reason is not None:
            raise ValueError(reason.decode())

    def close(self) -> None:
        """End the threads. The library may not be used any more."""
        self._library.ncompass_destroy(self._context)

    # the machine

    def measure_multiply_add(self, seconds: float) -> float:
        """Float operations per second of multiply-adds in registers, all threads together."""
        return self._measure("measure_arithmetic", 0, seconds)

    def measure_bf16_dot(self, seconds: float) -> float:
        """Float operations per second of the native bf16 dot product; 0 where there is none."""
        return self._measure("measure_arithmetic", 1, seconds)

    def measure_int8_dot(self, seconds: float) -> float:
        """Integer operations per second of the product that int8 weights and activations take."""
        return self._measure("measure_arithmetic", 2, seconds)

    def measure_read(self, memory: torch.Tensor) -> float:
        """Bytes per second of reading this tensor once."""
        return self._measure("measure_read", memory.data_ptr(), memory.nbytes)

    def _measure(self, name: str, *arguments: object) -> float:
        rate = c_double()
        self.call(name, *arguments, ctypes.byref(rate))
        return rate.value

    def _is_native_dot_faster(self) -> bool:
        """Best of many short runs each, alternating: the two rates differ by a factor of two.

        A start that chose differently, because a neighbour disturbed all runs of one way, would
        give other bits for the same prompt.
        """
        rates = [
            (self.measure_multiply_add(MEASUREMENT_S), self.measure_bf16_dot(MEASUREMENT_S))
            for _ in range(CHOICE_RUNS)
        ]
        return max(native for _, native in rates) > max(widened for widened, _ in rates)

    # what it can do

    @staticmethod
    def supports(*tensors: torch.Tensor) -> bool:
        """Whether these are fp32 or bf16 on the CPU with elements side by side."""
        for x in tensors:
            if x.dtype not in DTYPES or not x.is_cpu or (x.stride(-1) != 1 and x.shape[-1] > 1):
                return False
        return True

    @classmethod
    def supports_heads(cls, *tensors: torch.Tensor) -> bool:
        """Whether these are [T, heads, head_dim] of one dtype, a token's heads side by side."""
        dtype = tensors[0].dtype
        for x in tensors:
            _, stride, _ = x.stride()
            _, num_heads, head_dim = x.shape
            if x.dtype != dtype or (stride != head_dim and num_heads > 1):
                return False
        return cls.supports(*tensors)

    @staticmethod
    def supports_head_dim(head_dim: int) -> bool:
        """Whether attention can run on heads of this size."""
        return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM

    # the operations, as the public functions of the same name say

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [..., hidden] -> the same shape in weight's dtype."""
        rows = _rows(x)
        num_rows, hidden = rows.shape
        dtype = weight.dtype
        out = torch.empty(x.shape, dtype=dtype)
        self.call(
            "rms_norm",
            *(num_rows, hidden),
            *(rows.data_ptr(), rows.stride(0), DTYPES[x.dtype]),
            *(None, 0, 0, None),
            *(weight.data_ptr(), DTYPES[dtype], eps, out.data_ptr()),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        assert x.shape == residual.shape, (x.shape, residual.shape)
        rows, addend = _rows(residual), _rows(x)
        num_rows, hidden = rows.shape
        total = torch.empty(residual.shape, dtype=residual.dtype)
        out = torch.empty(x.shape, dtype=weight.dtype)
        self.call(
            "rms_norm",
            *(num_rows, hidden),
            *(rows.data_ptr(), rows.stride(0), DTYPES[rows.dtype]),
            *(addend.data_ptr(), addend.stride(0), DTYPES[addend.dtype], total.data_ptr()),
            *(weight.data_ptr(), DTYPES[weight.dtype], eps, out.data_ptr()),
        )
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [T, 2 * intermediate] -> [T, intermediate]."""
        num_rows, width = gate_up.shape
        dtype = gate_up.dtype
        out = torch.empty((num_rows, width // 2), dtype=dtype)
        self.call(
            "silu_and_mul",
            *(num_rows, width // 2),
            *(gate_up.data_ptr(), gate_up.stride(0), DTYPES[dtype], out.data_ptr()),
        )
        return out

    def quantise(self, x: torch.Tensor, group_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, length] -> int8 of the same shape, fp32 scales [T, groups of group_length]."""
        num_rows, length = x.shape
        out = torch.empty((num_rows, length), dtype=torch.int8)
        scales = torch.empty((num_rows, -(-length // group_length)))
        self.call(
            "quantise",
            *(num_rows, length, group_length),
            *(x.data_ptr(), x.stride(0), DTYPES[x.dtype], out.data_ptr(), scales.data_ptr()),
        )
        return out, scales

    def group_length(self, quantization: Quantization) -> int:
        """Members of a sum that share a scale; 0: all of them."""
        return int(self._library.ncompass_group_length(FORMS[quantization]))

    def end_model(self) -> None:
        """All weights of a model are packed: what comes next shares no memory with them."""
        self._weights.close()

    def pack(self, weight: torch.Tensor, quantization: Quantization = "none") -> PackedWeight:
        """weight: [out_features, in_features] -> its packed form, quantised by output if asked."""
        out_features, in_features = weight.shape
        form, scales, source = DTYPES[weight.dtype], None, weight
        if quantization != "none":
            form = FORMS[quantization]
            group_length = self.group_length(quantization) or in_features
            source, scales = self.quantise(weight, group_length)
        num_bytes = self._library.ncompass_packed_bytes(
            self._context, out_features, in_features, form
        )
        packed = PackedWeight(
            out_features, in_features, weight.dtype, form, self._weights.take(num_bytes)
        )
        self.call(
            "pack",
            *(out_features, in_features, source.data_ptr(), source.stride(0)),
            *(None if scales is None else scales.data_ptr(), form, packed.pointer),
        )
        return packed

    def unpack_rows(self, weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        """rows: [R] int64 -> fp32 [R, in_features] of a weight that is not quantised.

        Raises ValueError where a row is beyond the weight.
        """
        assert rows.dtype == torch.int64
        assert rows.is_contiguous()
        out = torch.empty((len(rows), weight.in_features))
        self.call(
            "unpack_rows",
            *(weight.out_features, weight.in_features, weight.pointer, weight.form),
            *(len(rows), rows.data_ptr(), out.data_ptr()),
        )
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features] in the dtype of the residual, if there is one.

        The bias is fp32. Without residual the result has `dtype`, or the weight's.
        """
        num_rows, in_features = x.shape
        assert in_features == weight.in_features, (x.shape, weight.in_features)
        dtype = residual.dtype if residual is not None else dtype or weight.dtype
        shape = (num_rows, weight.out_features)
        out = torch.empty(shape, dtype=dtype)
        assert residual is None or residual.shape == shape, (residual.shape, shape)
        self.call(
            "linear",
            *(num_rows, weight.out_features, in_features),
            *(x.data_ptr(), x.stride(0), DTYPES[x.dtype], weight.pointer, weight.form),
            None if bias is None else bias.data_ptr(),
            *(None, 0) if residual is None else (residual.data_ptr(), residual.stride(0)),
            *(out.data_ptr(), DTYPES[dtype]),
        )
        return out

    def gated_linear(
        self,
        x: torch.Tensor,
        gate: PackedWeight,
        up: PackedWeight,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x: [T, in_features] -> silu(x gate + bias) * (x up + bias), in `dtype` or the weights'."""
        num_rows, in_features = x.shape
        assert in_features == gate.in_features == up.in_features, (x.shape, gate.in_features)
        assert gate.form == up.form
        assert gate.out_features == up.out_features
        out = torch.empty((num_rows, gate.out_features), dtype=dtype or gate.dtype)
        self.call(
            "gated_linear",
            *(num_rows, gate.out_features, in_features),
            *(x.data_ptr(), x.stride(0), DTYPES[x.dtype]),
            *(gate.pointer, None if gate_bias is None else gate_bias.data_ptr()),
            *(up.pointer, None if up_bias is None else up_bias.data_ptr()),
            *(gate.form, out.data_ptr(), DTYPES[out.dtype]),
        )
        return out

    def decode(self, model: object, step: object) -> None:
        """Run one step of a whole model; see `kernels.cpu.decoder`, which makes both structures."""
        self.call("decode", model, step)


class PackedWeight:
    """A weight in the order in which the register tiles read it; `dtype` is that of its results."""

    __slots__ = ("dtype", "form", "in_features", "memory", "out_features", "pointer")

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        form: int,
        memory: torch.Tensor,
    ) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.form = form
        self.memory = memory
        self.pointer = memory.data_ptr()


_active: list[CpuLibrary] = []


def enable(path: Path, num_threads: int, native_bf16_dot: bool | None = None) -> CpuLibrary:
    """Load the library for this process with a team of `num_threads`; see `CpuLibrary`."""
    disable()
    library = CpuLibrary(path, num_threads, native_bf16_dot)
    _active.append(library)
    return library


def active() -> CpuLibrary | None:
    """The library of this process, if one is enabled."""
    return _active[0] if _active else None


def disable() -> None:
    """Go back to plain torch. Weights and caches made for the library cannot be used then."""
    while _active:
        _active.pop().close()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, hidden], without a copy where its strides allow."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
