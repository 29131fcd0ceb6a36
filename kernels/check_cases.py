"""Every Triton kernel in the types and tiles that the product launches, for `kernels.check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention_tile import (
    MAX_GROUP_OF_FP32,
    MAX_REGISTERS,
    MIN_DOT_ROWS,
    NUM_STAGES,
    TMA_CAPABILITY,
)
from kernels.gated_activation import _silu_and_mul_kernel
from kernels.mixed_attention import _mixed_kernel
from kernels.paged_decode_attention import _decode_kernel, decode_constants, decode_warps
from kernels.paged_prefill_attention import tile_rows, tile_warps
from kernels.rms_norm import _rms_norm_kernel
from kernels.rotary import _rotary_and_write_kv_kernel, rotary_constants
from kernels.sampling_kernel import MAX_BLOCK, _log_probs_kernel, _sample_kernel
from kernels.sampling_kernel import NUM_WARPS as SAMPLING_WARPS
from kernels.scaled_gemm import (
    COLUMNS,
    DEPTH,
    LARGEST,
    MAX_ROWS,
    QUANTISE_BLOCK,
    Kind,
    _quantise_rows_kernel,
    _scaled_gemm_kernel,
    gemm_rows,
    gemm_warps,
)
from kernels.triton_support import FLOAT8_CAPABILITY, Kernel, next_power_of_2

# Compute capability -> bytes of shared memory that one program may use.
TARGETS = {80: 166_912, 90: 232_448, 100: 232_448}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUM_SEQUENCES = 256
# (query heads of a KV head, key channels, value channels): Llama 3 8B, SmolLM2, Gemma 2B, Phi 2,
# DeepSeek V3; StarCoder and Falcon 7B, which have one KV head.
HEADS = (
    *((4, 128, 128), (3, 64, 64), (8, 256, 256), (1, 80, 80), (1, 192, 128)),
    *((48, 128, 128), (71, 64, 64)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with the types of its arguments and its compile-time parameters."""

    name: str
    kernel: Kernel
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    """Tiles of a loop in flight: Triton's own choice where the product makes none."""
    max_registers: int | None = None

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments that are multiples of 16, as the product's are: wide loads rest on that."""
        names: list[str] = self.kernel.arg_names
        wanted = ("_ptr", "_stride", "_features", "hidden", "width", "vocabulary")
        return tuple(name for name in names if name.endswith(wanted) and name != "table_stride")

    @property
    def rows(self) -> int:
        """Queries in a tile of prefill; 0 for kernels that have none."""
        return int(self.constants.get("ROWS", 0))

    @property
    def has_products(self) -> bool:
        """Whether it multiplies tiles: attention and the products of 8-bit numbers do."""
        return "TILE" in self.constants or "DEPTH" in self.constants


def cases(dtype: str, capability: int) -> Iterator[Case]:
    """Every kernel in the shapes that the product launches."""
    x, wide = f"*{dtype}", "*fp32"
    norm = {"x_ptr": x, "residual_ptr": wide, "weight_ptr": x, "out_ptr": x, "sum_ptr": wide}
    norm |= {"x_stride": "i32", "residual_stride": "i32", "hidden": "i32", "eps": "fp32"}
    for has_residual, block in ((False, 1024), (True, 4096), (True, 16384)):
        constants = {"HAS_RESIDUAL": has_residual, "BLOCK": block}
        yield Case(f"rms_norm_{block}", _rms_norm_kernel, norm, constants, min(16, block // 256))
    gated = {"gate_up_ptr": x, "out_ptr": x, "gate_up_stride": "i32", "width": "i32"}
    yield Case("silu_and_mul", _silu_and_mul_kernel, gated, {"BLOCK": 1024})
    yield from _sampling(dtype)
    yield from _scaled(dtype, capability)
    for heads in HEADS:
        if dtype == "fp32" and heads[0] > MAX_GROUP_OF_FP32:
            continue
        for kv_dtype in ("", "fp8") if dtype != "fp32" else ("",):
            yield _rotary(heads, dtype, kv_dtype, capability)
            yield from _attention(heads, dtype, kv_dtype, capability)


def _sampling(dtype: str) -> Iterator[Case]:
    """Small and large vocabularies; all rows greedy, and any."""
    pointers = {"logits_ptr": f"*{dtype}", "tokens_ptr": "*i64", "temperature_ptr": "*fp32"}
    pointers |= {"top_p_ptr": "*fp32", "top_k_ptr": "*i64", "min_p_ptr": "*fp32"}
    pointers |= dict.fromkeys(
        ("seeds_ptr", "positions_ptr", "token_ids_ptr", "top_ids_ptr"), "*i64"
    )
    pointers |= {"token_ptr": "*fp32", "top_ptr": "*fp32"}
    types = pointers | dict.fromkeys(("logits_stride", "vocabulary", "num_top"), "i32")
    block = {"BLOCK": MAX_BLOCK}
    yield Case("greedy", _sample_kernel, types, block | {"IS_GREEDY": True}, SAMPLING_WARPS)
    yield Case("sample", _sample_kernel, types, block | {"IS_GREEDY": False}, SAMPLING_WARPS)
    yield Case("log_probs", _log_probs_kernel, types, block, SAMPLING_WARPS)


def _scaled(dtype: str, capability: int) -> Iterator[Case]:
    """Quantisation of rows and every tile of the products; 8-bit floats where the GPU has them."""
    kinds: tuple[Kind, ...] = ("int8", "fp8")
    for kind in kinds:
        if kind == "fp8" and divmod(capability, 10) < FLOAT8_CAPABILITY:
            continue
        element = {"int8": "*i8", "fp8": "*fp8e4nv"}[kind]
        types = {"x_ptr": f"*{dtype}", "out_ptr": element, "scales_ptr": "*fp32"}
        types |= {"x_stride": "i32", "width": "i32"}
        flags = {"LARGEST": LARGEST[kind], "IS_INTEGER": kind == "int8", "BLOCK": QUANTISE_BLOCK}
        yield Case(f"quantise_rows_{kind}", _quantise_rows_kernel, types, flags, 8)
        types = {"x_ptr": element, "weight_ptr": element, "out_ptr": f"*{dtype}"}
        types |= dict.fromkeys(("x_scales_ptr", "weight_scales_ptr"), "*fp32")
        types |= {"bias_ptr": f"*{dtype}", "num_rows": "i32", "out_features": "i32"}
        types |= {"in_features": "i32"}
        for rows in sorted({gemm_rows(num_rows) for num_rows in range(1, MAX_ROWS + 1)}):
            constants = {"ROWS": rows, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
            constants |= {"IS_INTEGER": kind == "int8", "HAS_BIAS": True}
            warps = gemm_warps(rows)
            yield Case(f"gemm_{kind}_{rows}", _scaled_gemm_kernel, types, constants, warps)


def _rotary(heads: tuple[int, int, int], dtype: str, kv_dtype: str, capability: int) -> Case:
    """Without norms, and with them where the cache is 8-bit, which is the most that it does."""
    group, head_dim, value_dim = heads
    x, wide, long = f"*{dtype}", "*fp32", "*i64"
    page, float8 = _page(x, kv_dtype, capability)
    types = {"q_ptr": x, "k_ptr": x, "v_ptr": x, "query_norm_ptr": x, "key_norm_ptr": x}
    types |= {"cos_sin_ptr": wide, "keys_ptr": page, "values_ptr": page, "positions_ptr": long}
    types |= {"slots_ptr": long, "key_scales_ptr": wide, "value_scales_ptr": wide, "eps": "fp32"}
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
    num_kv_heads = 8 if group <= 8 else 1
    shape = rotary_constants(num_kv_heads * group, num_kv_heads, head_dim, value_dim, head_dim // 2)
    flags = {"HAS_NORMS": bool(kv_dtype), "FLOAT8": float8}
    name = f"rotary_{_heads_name(heads, kv_dtype)}"
    return Case(name, _rotary_and_write_kv_kernel, types, shape | flags)


def _heads_name(heads: tuple[int, int, int], kv_dtype: str) -> str:
    group, head_dim, value_dim = heads
    name = f"g{group}_d{head_dim}" + (f"_v{value_dim}" if value_dim != head_dim else "")
    return f"{name}_{kv_dtype}" if kv_dtype else name


def _page(x: str, kv_dtype: str, capability: int) -> tuple[str, str]:
    """The type of a page's elements, and how they are read."""
    if not kv_dtype:
        return x, "none"
    return (
        ("*fp8e4nv", "native") if divmod(capability, 10) >= FLOAT8_CAPABILITY else ("*u8", "bits")
    )


def _attention(
    heads: tuple[int, int, int], dtype: str, kv_dtype: str, capability: int
) -> Iterator[Case]:
    """Decode, and the mixed launch with every tile that the product chooses for these heads."""
    group, head_dim, value_dim = heads
    x, wide = f"*{dtype}", "*fp32"
    page, float8 = _page(x, kv_dtype, capability)
    types = {"q_ptr": x, "sinks_ptr": x, "out_ptr": x, "keys_ptr": page, "values_ptr": page}
    types |= dict.fromkeys(("starts_ptr", "lens_ptr", "tables_ptr", "arrivals_ptr"), "*i32")
    types |= dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), wide if kv_dtype else x)
    types |= dict.fromkeys(("partial_ptr", "statistics_ptr"), wide)
    types |= dict.fromkeys(("num_decode_programs", "num_sequences", "q_stride"), "i32")
    types |= {"table_stride": "i32", "num_kv_heads": "i32", "scale": "fp32", "window": "i32"}
    types |= {"softcap": "fp32", "keys_box": page, "values_box": page}
    constants = decode_constants(DTYPES[dtype], group, head_dim, value_dim, NUM_SEQUENCES)
    has_boxes = capability >= 10 * TMA_CAPABILITY and dtype != "fp32"
    if has_boxes:
        tile = constants["TILE"]
        types["keys_box"] = f"tensordesc<{page[1:]}[{tile}, {constants['HEAD_BLOCK']}]>"
        types["values_box"] = f"tensordesc<{page[1:]}[{tile}, {constants['VALUE_BLOCK']}]>"
    name = _heads_name(heads, kv_dtype)
    widest = max(head_dim, value_dim)
    least = max(MIN_DOT_ROWS, next_power_of_2(group))
    largest = tile_rows(DTYPES[dtype], widest, capability // 10, is_float8=bool(kv_dtype))
    for has_all in (False, True):
        flags = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), has_all)
        suffix = f"{name}{'_window_softcap_sinks' if has_all else ''}"
        fixed = constants | flags | {"FLOAT8": float8}
        yield Case(
            f"decode_{suffix}",
            _decode_kernel,
            types,
            fixed,
            num_warps=decode_warps(widest, group),
            num_stages=NUM_STAGES,
            max_registers=MAX_REGISTERS,
        )
        for rows in (16, 32, 64, 128):
            if not least <= rows <= max(least, largest):
                continue
            yield Case(
                f"mixed_{rows}_{suffix}",
                _mixed_kernel,
                types,
                fixed | {"ROWS": rows, "USES_BOXES": has_boxes},
                num_warps=tile_warps(rows, widest, capability // 10),
                num_stages=NUM_STAGES,
                max_registers=MAX_REGISTERS,
            )
