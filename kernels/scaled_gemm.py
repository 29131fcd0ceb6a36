"""Products of 8-bit activations with 8-bit weights (W8A8), in integers or in floats (e4m3).

    y[t, n] = a[t] b[n] sum_k x8[t, k] w8[n, k] + bias[n],     x ~ a[t] x8[t],  w ~ b[n] w8[n]

a is a row's largest magnitude in units of the largest 8-bit number, 127 or 448, found anew for each
token; b is that of an output channel, found once. Sums are exact in int32, or in fp32. Both kinds
halve what a weight takes and double the rate of a tensor core that has them.

Sources: LLM.int8(), arXiv 2208.07339; FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.attention_tile import MIN_DOT_ROWS
from kernels.float8 import to_e4m3
from kernels.triton_support import (
    cdiv,
    jit,
    kernel,
    multiplies_float8,
    next_power_of_2,
    runs_triton,
    tl,
)

Kind = Literal["int8", "fp8"]
DTYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
SMALLEST_MAGNITUDE = 1e-30  # a row of zeros has this for its largest, and stays zeros
QUANTISE_BLOCK = 2048
WIDE_LOAD = 16
MAX_ROWS, COLUMNS, DEPTH = 128, 128, 128  # of a tile


@jit
def _quantise_rows_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program quantises one row; the second reading comes from the cache."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2^31
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0), 1e-30) / LARGEST
    tl.store(scales_ptr + row, scale)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < width, other=0.0)
        x = x.to(tl.float32) / scale
        if IS_INTEGER:
            # Half to even: beyond 1.5 * 2^23 fp32 has no fractions left.
            x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
            out = x.to(tl.int8)
        else:
            out = to_e4m3(x, out_ptr.dtype.element_ty, "native")
        tl.store(out_ptr + row * width + columns, out, mask=columns < width)


@kernel("num_rows")
def _scaled_gemm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """One program: a tile of ROWS tokens by COLUMNS outputs. Rows of a column come first."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    rows = (program % num_row_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = (program // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    depth = tl.arange(0, DEPTH)  # [DEPTH]
    is_row, is_column = rows < num_rows, columns < out_features
    x_place = x_ptr + rows.to(tl.int64)[:, None] * in_features + depth[None, :]
    weight_place = weight_ptr + columns.to(tl.int64)[:, None] * in_features + depth[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.int32 if IS_INTEGER else tl.float32)
    for first in range(0, in_features, DEPTH):
        is_there = (first + depth < in_features)[None, :]
        x = tl.load(x_place + first, mask=is_row[:, None] & is_there, other=0.0)
        weight = tl.load(weight_place + first, mask=is_column[:, None] & is_there, other=0.0)
        if IS_INTEGER:
            sums = tl.dot(x, tl.trans(weight), sums, out_dtype=tl.int32)
        else:
            # An sm_90 adds 8-bit floats up in 14 bits or so: after each tile its sum joins fp32.
            sums = tl.dot(x, tl.trans(weight), sums, max_num_imprecise_acc=DEPTH)
    x_scales = tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)
    weight_scales = tl.load(weight_scales_ptr + columns, mask=is_column, other=0.0)
    out = sums.to(tl.float32) * x_scales[:, None] * weight_scales[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0)
        out += bias.to(tl.float32)[None, :]
    place = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A weight [out_features, in_features] in 8 bits, and a scale for each output channel, fp32."""

    values: torch.Tensor
    scales: torch.Tensor
    kind: Kind

    @classmethod
    def quantise(cls, weight: torch.Tensor, kind: Kind) -> ScaledWeight:
        """The nearest 8-bit numbers to a weight of any float dtype."""
        return cls(*quantise_rows_with_torch(weight, kind), kind)

    @property
    def num_bytes(self) -> int:
        """Of the weight, as a product reads it."""
        return self.values.nbytes + self.scales.nbytes


def quantise_rows_with_torch(x: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, K] -> 8-bit numbers [T, K] and a scale for each row [T] fp32."""
    wide = x.float()
    largest = wide.abs().amax(dim=1).clamp(min=SMALLEST_MAGNITUDE)
    scales = largest / LARGEST[kind]
    scaled = (wide / scales[:, None]).clamp(-LARGEST[kind], LARGEST[kind])
    return (scaled.round() if kind == "int8" else scaled).to(DTYPES[kind]), scales


def quantise_rows(x: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a kernel where one runs; rows of x may lie apart."""
    if not runs_triton(x):
        return quantise_rows_with_torch(x, kind)
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=DTYPES[kind], device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    assert x.stride(1) == 1
    if num_rows > 0:
        _quantise_rows_kernel[(num_rows,)](
            *(x, out, scales, x.stride(0), width),
            LARGEST=LARGEST[kind],
            IS_INTEGER=kind == "int8",
            BLOCK=min(QUANTISE_BLOCK, next_power_of_2(width)),
            num_warps=8,
        )
    return out, scales


def scaled_linear(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [T, in_features] -> [T, out_features] in x's dtype, both factors in 8 bits.

    A GPU without 8-bit float products multiplies x as it is with the widened weight. The kernel
    wants rows of a multiple of 16 bytes, or its loads would be of single bytes.
    """
    if weight.kind == "fp8" and not multiplies_float8(x.device):
        wide = weight.values.to(x.dtype) * weight.scales[:, None].to(x.dtype)
        return torch.nn.functional.linear(x, wide, bias)
    values, scales = quantise_rows(x, weight.kind)
    if not runs_triton(x) or x.shape[1] % WIDE_LOAD:
        out = values.double() @ weight.values.double().T * scales[:, None] * weight.scales
        return (out if bias is None else out + bias).to(x.dtype)
    num_rows, in_features = x.shape
    out_features = weight.values.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    rows = gemm_rows(num_rows)
    if num_rows > 0:
        _scaled_gemm_kernel[(cdiv(num_rows, rows) * cdiv(out_features, COLUMNS),)](
            *(values, weight.values, scales, weight.scales, out if bias is None else bias, out),
            *(num_rows, out_features, in_features),
            ROWS=rows,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            IS_INTEGER=weight.kind == "int8",
            HAS_BIAS=bias is not None,
            num_warps=gemm_warps(rows),
            num_stages=3,
        )
    return out


def gemm_rows(num_rows: int) -> int:
    """Tokens of one tile: few for few tokens, as idle rows cost as much as busy ones."""
    return min(MAX_ROWS, max(MIN_DOT_ROWS, next_power_of_2(num_rows)))


def gemm_warps(rows: int) -> int:
    """How many warps share a tile, so that its sums fit their registers."""
    return 8 if rows >= 64 else 4
