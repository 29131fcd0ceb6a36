"""Compiles every Triton kernel ahead of time for the GPUs we target; it needs no GPU.

    python -m kernels.check [NAME ...] [--dtype bf16] [--target 90] [--table FILE]

Prints registers, shared memory, spills and the instructions that matter of every kernel, data type
and target. Exits 1 if one does not compile, spills, takes more than the chip has, or lacks an
instruction that its speed rests on. It catches what the interpreter cannot: tiles too small for a
tensor core, types that do not match, shared memory that overflows. `--table` keeps the result.
A process of its own: it must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from kernels.gated_activation import _silu_and_mul_kernel
from kernels.paged_decode_attention import (
    NUM_STAGES,
    _decode_merge_kernel,
    _decode_split_kernel,
    tokens_at_once,
)
from kernels.paged_prefill_attention import _prefill_kernel, tile_rows, tile_warps
from kernels.rms_norm import _rms_norm_kernel
from kernels.rotary import _rotary_and_write_kv_kernel
from kernels.triton_support import Kernel

# Compute capability -> bytes of shared memory that one program may use.
TARGETS = {80: 166_912, 90: 232_448}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Heads of (group, head_dim): Llama 3 8B, SmolLM2, one head for all, and an odd one.
HEADS = ((4, 128), (3, 64), (8, 256), (1, 80))


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with the types of its arguments and its compile-time parameters."""

    name: str
    kernel: Kernel
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4

    @property
    def has_products(self) -> bool:
        """Whether it multiplies tiles: both attention kernels do."""
        return "TILE" in self.constants


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler says of one kernel; the counts are of instructions in its code."""

    registers: int
    shared_bytes: int
    spills: int
    warp_products: int
    """HMMA: a warp multiplies from its registers."""
    group_products: int
    """HGMMA on sm_90, UTC…MMA on sm_100: a tile multiplies straight from shared memory."""
    wide_loads: int
    """128 bits a thread, from global memory to registers or to shared memory."""

    def problems(self, case: Case, capability: int, dtype: str) -> list[str]:
        """What is wrong with it; empty when it is as fast as its file says."""
        uses_tensor_cores = dtype != "fp32"
        rows = case.constants.get("ROWS", 0)
        found = {
            "spills": self.spills > 0,
            "more shared memory than the chip has": self.shared_bytes > TARGETS[capability],
            "no tensor-core product": (
                uses_tensor_cores
                and case.has_products
                and not self.warp_products + self.group_products
            ),
            "no product from shared memory": (
                uses_tensor_cores and capability >= 90 and rows >= 64 and not self.group_products
            ),
            "no wide load": case.has_products and not self.wide_loads,
        }
        return [problem for problem, is_so in found.items() if is_so]


def cases(dtype: str, capability: int) -> Iterator[Case]:
    """Every kernel in the shapes that the product launches."""
    x, wide, long = f"*{dtype}", "*fp32", "*i64"
    norm = {"x_ptr": x, "residual_ptr": wide, "weight_ptr": x, "out_ptr": x, "sum_ptr": wide}
    norm |= {"x_stride": "i32", "residual_stride": "i32", "hidden": "i32", "eps": "fp32"}
    for has_residual, block in ((False, 1024), (True, 4096)):
        constants = {"HAS_RESIDUAL": has_residual, "BLOCK": block}
        yield Case(f"rms_norm_{block}", _rms_norm_kernel, norm, constants, min(16, block // 256))
    gated = {"gate_up_ptr": x, "out_ptr": x, "gate_up_stride": "i32", "width": "i32"}
    yield Case("silu_and_mul", _silu_and_mul_kernel, gated, {"BLOCK": 1024})
    for group, head_dim in HEADS:
        suffix = f"g{group}_d{head_dim}"
        block = 1 << (head_dim - 1).bit_length()
        pointers = {"q_ptr": x, "k_ptr": x, "v_ptr": x, "cos_sin_ptr": wide, "keys_ptr": x}
        pointers |= {"values_ptr": x, "positions_ptr": long, "slots_ptr": long}
        strides = dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
        heads = {"GROUP": group, "HEAD_DIM": head_dim, "HEAD_BLOCK": block}
        shape = {"NUM_HEADS": 8 * group, "HEADS_BLOCK": 1 << (8 * group - 1).bit_length()}
        shape |= {"NUM_KV_HEADS": 8, "KV_HEADS_BLOCK": 8, "HEAD_DIM": head_dim}
        shape |= {"HEAD_BLOCK": block, "HALF": head_dim // 2, "HALF_BLOCK": block // 2, "PAGE": 64}
        yield Case(f"rotary_{suffix}", _rotary_and_write_kv_kernel, pointers | strides, shape)
        yield from _attention(suffix, heads, dtype, capability // 10)


def _attention(suffix: str, heads: dict[str, int], dtype: str, capability: int) -> Iterator[Case]:
    x, index = f"*{dtype}", "*i32"
    head_dim = heads["HEAD_DIM"]
    tile = tokens_at_once(DTYPES[dtype], 64)
    largest_tile = tile_rows(DTYPES[dtype], head_dim, capability)
    scalars = {"table_stride": "i32", "num_kv_heads": "i32", "scale": "fp32"}
    scalars |= {"window": "i32", "softcap": "fp32"}
    partial = {"partial_ptr": "*fp32", "largest_ptr": "*fp32", "weight_ptr": "*fp32"}
    decode = {"q_ptr": x, "keys_ptr": x, "values_ptr": x, "tables_ptr": index, "lens_ptr": index}
    for has_window, has_softcap in ((False, False), (True, True)):
        flags = {"HAS_WINDOW": has_window, "HAS_SOFTCAP": has_softcap, "PAGE": 64, "TILE": tile}
        name = f"{suffix}{'_window_softcap' if has_window else ''}"
        yield Case(
            f"decode_split_{name}",
            _decode_split_kernel,
            decode | partial | scalars,
            heads | flags | {"GROUP_BLOCK": 16, "PAGES": 8},
        )
        prefill = {"q_ptr": x, "keys_ptr": x, "values_ptr": x, "out_ptr": x, "starts_ptr": index}
        prefill |= {"lens_ptr": index, "tables_ptr": index, "q_stride": "i32"}
        for rows in (rows for rows in (16, 32, 64, 128) if rows <= largest_tile):
            yield Case(
                f"prefill_{rows}_{name}",
                _prefill_kernel,
                prefill | scalars,
                heads | flags | {"ROWS": rows},
                num_warps=tile_warps(rows, head_dim, capability),
            )
    merge = partial | {"out_ptr": x, "num_splits": "i32", "num_kv_heads": "i32"}
    constants = heads | {"GROUP_BLOCK": 16, "SPLITS_BLOCK": 16}
    yield Case(f"decode_merge_{suffix}", _decode_merge_kernel, merge, constants)


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for one GPU and read the assembler's account of it."""
    # Pointers, strides and head counts are aligned as the product aligns them: without that the
    # compiler may not use wide loads and the figures would be of another kernel.
    names: list[str] = case.kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith(("_ptr", "_stride")) and name != "table_stride"
    }
    types = {name: case.types.get(name, "constexpr") for name in names}
    source = ASTSource(case.kernel, types, case.constants, attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": NUM_STAGES}
    binary = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _account(binary.asm["cubin"], binary.metadata.shared)


def _account(cubin: bytes, shared_bytes: int) -> Compiled:
    usage, assembly = _cuobjdump(cubin, "-res-usage"), _cuobjdump(cubin, "--dump-sass")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Compiled(
        registers=int(registers[1]),
        shared_bytes=shared_bytes,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
        warp_products=len(re.findall(r"\bHMMA\.", assembly)),
        group_products=len(re.findall(r"\b(?:HGMMA|UTC[A-Z]*MMA)\b", assembly)),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*128\b", assembly)),
    )


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        ran = subprocess.run(  # noqa: S603 - Triton's own tool on a file of ours
            command, capture_output=True, text=True, check=True
        )
    return ran.stdout


def check_case(case: Case, dtype: str, capability: int) -> Row:
    """Compile one case and print its line."""
    place = f"{case.name:38} {dtype:5} sm_{capability:<4}"
    try:
        result = compile_case(case, capability)
    except Exception as failure:
        # Whatever the compiler raises is the answer; the other kernels are still asked.
        sys.stdout.write(f"{place} FAILED: {failure}\n")
        return Row(case.name, dtype, capability, None, ("does not compile",))
    problems = tuple(result.problems(case, capability, dtype))
    figures = " ".join(f"{value:{width}}" for value, width in zip(
        astuple(result), (4, 7, 6, 5, 6, 5), strict=True
    ))  # fmt: skip
    sys.stdout.write(f"{place} {figures}  {', '.join(problems)}\n")
    return Row(case.name, dtype, capability, result, problems)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `compiled` is None where it does not compile."""

    name: str
    dtype: str
    capability: int
    compiled: Compiled | None
    problems: tuple[str, ...]


def write_table(rows: list[Row], path: Path) -> None:
    """A Markdown table of what was compiled, with the version of the compiler."""
    lines = [
        "# Every Triton kernel, compiled ahead of time",
        "",
        f"Written by `make check-kernels` with Triton {triton.__version__}; no GPU has run them.",
        "Products are tensor-core instructions: HMMA by a warp, group (HGMMA, UTC…MMA) by a tile.",
        "",
        "| kernel | type | target | registers | shared bytes | spills | HMMA | group | 128-bit loads |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        figures = ("failed",) * 6 if row.compiled is None else astuple(row.compiled)
        cells = (row.name, row.dtype, f"sm_{row.capability}", *figures)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Compile everything, or what was asked for; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="kernels as the table names them; default all")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--target", choices=TARGETS, type=int, action="append")
    parser.add_argument("--table", type=Path, help="write the table here, in Markdown")
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    chosen = [
        (case, dtype, capability)
        for dtype in arguments.dtype or DTYPES
        for capability in targets
        for case in cases(dtype, capability)
        if not arguments.names or case.name in arguments.names
    ]
    sys.stdout.write(
        f"{'kernel':38} {'type':5} {'target':7} regs  shared spills  HMMA  group wide\n"
    )
    rows = [check_case(*choice) for choice in chosen]
    compiled = [row.compiled for row in rows if row.compiled is not None]
    if arguments.table is not None:
        write_table(rows, arguments.table)
    sys.stdout.write(
        f"kernels={len({row.name for row in rows})} targets={len(targets)}"
        f" compiled={len(compiled)} spills={sum(result.spills > 0 for result in compiled)}\n"
    )
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
