"""Compiles every Triton kernel ahead of time for the GPUs we target; it needs no GPU.

    python -m kernels.check [NAME ...] [--dtype bf16] [--target 90] [--table FILE [--write]]

Prints registers, shared memory, spills and the instructions that matter of every kernel, data type
and target. Exits 1 if one does not compile, spills, takes more than the chip has, or lacks an
instruction that its speed rests on. It catches what the interpreter cannot: tiles too small for a
tensor core, types that do not match, shared memory that overflows. `--table` names the file that
holds the result and exits 1 if it says anything else; with `--write` it is written. What has been
compiled before comes from Triton's cache. A process of its own: it must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from kernels.attention_tile import NUM_STAGES
from kernels.check_cases import DTYPES, Case, cases

# Compute capability -> bytes of shared memory that one program may use.
TARGETS = {80: 166_912, 90: 232_448, 100: 232_448}
REGISTERS_OF_A_PROCESSOR = 65_536
COLUMNS = ("registers", "shared", "spills", "MMA", "group", "128-bit", "TMA", "release")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler says of one kernel; the counts are of instructions in its code."""

    registers: int
    shared_bytes: int
    spills: int
    warp_products: int
    """HMMA, for 8-bit numbers IMMA and QMMA: a warp multiplies from its registers."""
    group_products: int
    """HGMMA, IGMMA, QGMMA on sm_90, UTC…MMA on sm_100: a tile multiplies straight from shared memory."""
    wide_loads: int
    """128 bits a thread, from global memory to registers or to shared memory."""
    box_loads: int
    """UTMALDG: a whole tile, fetched by the tensor memory accelerator."""
    releases: int
    """Atomic additions that publish what a program has stored, and see what others have."""

    def problems(self, case: Case, capability: int, dtype: str) -> list[str]:
        """What is wrong with it; empty when it is as fast as its file says."""
        # Triton 3.7 multiplies integers from registers on sm_100; its tile products know floats only.
        uses_tensor_cores = dtype != "fp32" or "DEPTH" in case.constants
        threads = 32 * case.num_warps
        found = {
            "spills": self.spills > 0,
            "more registers than a processor has": (
                self.registers * threads > REGISTERS_OF_A_PROCESSOR
            ),
            "more shared memory than the chip has": self.shared_bytes > TARGETS[capability],
            "no tensor-core product": (
                uses_tensor_cores
                and case.has_products
                and not self.warp_products + self.group_products
            ),
            "no product from shared memory": (
                uses_tensor_cores
                and capability >= 90
                and case.rows >= 64
                and not (capability >= 100 and case.constants.get("IS_INTEGER"))
                and not self.group_products
            ),
            "no wide load": case.has_products and not self.wide_loads,
            "no load by the accelerator": (
                bool(case.constants.get("USES_BOXES")) and not self.box_loads
            ),
            "no release of the partial sums": "TILE" in case.constants and not self.releases,
        }
        return [problem for problem, is_so in found.items() if is_so]


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for one GPU and read the assembler's account of it."""
    # Pointers, strides and head counts are aligned as the product aligns them: without that the
    # compiler may not use wide loads and the figures would be of another kernel.
    names: list[str] = case.kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith(("_ptr", "_stride", "in_features")) and name != "table_stride"
    }
    types = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    source = ASTSource(case.kernel, types, case.constants, attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": NUM_STAGES}
    if case.max_registers is not None:
        options["maxnreg"] = case.max_registers
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
        warp_products=len(re.findall(r"\b[HIQ]MMA\.", assembly)),
        group_products=len(re.findall(r"\b(?:[HIQ]GMMA|UTC[A-Z]*MMA)\b", assembly)),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*128\b", assembly)),
        box_loads=len(re.findall(r"\bUTMALDG\b", assembly)),
        releases=len(re.findall(r"\bATOMG?\.\S*\bADD\b.*", assembly)),
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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `compiled` is None where it does not compile."""

    name: str
    dtype: str
    capability: int
    compiled: Compiled | None
    problems: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has them."""
        figures = ("failed",) * len(COLUMNS) if self.compiled is None else astuple(self.compiled)
        return (self.name, self.dtype, f"sm_{self.capability}", *map(str, figures))


def check_case(case: Case, dtype: str, capability: int) -> Row:
    """Compile one case and tell what is wrong with it."""
    try:
        result = compile_case(case, capability)
    except Exception as failure:
        # Whatever the compiler raises is the answer; the other kernels are still asked.
        innermost: BaseException = failure
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        return Row(case.name, dtype, capability, None, (f"does not compile: {innermost}",))
    problems = tuple(result.problems(case, capability, dtype))
    return Row(case.name, dtype, capability, result, problems)


def check_named(name: str, dtype: str, capability: int) -> Row:
    """The same in a process of the pool, to which a kernel does not travel."""
    case = next(case for case in cases(dtype, capability) if case.name == name)
    return check_case(case, dtype, capability)


def check_all(chosen: list[tuple[str, str, int]]) -> list[Row]:
    """Compile everything, as many at once as there are processors, and print a line for each."""
    layout = "{:44} {:5} {:7} {:>9} {:>7} {:>6} {:>5} {:>5} {:>7} {:>4} {:>7}"
    sys.stdout.write(layout.format("kernel", "type", "target", *COLUMNS) + "\n")
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for row in pool.map(check_named, *zip(*chosen, strict=True)):
            sys.stdout.write(layout.format(*row.cells) + f"  {', '.join(row.problems)}\n")
            sys.stdout.flush()
            rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """What was compiled as Markdown, with the version of the compiler."""
    lines = [
        "# Every Triton kernel, compiled ahead of time",
        "",
        f"Written by `make check-kernels FLAGS=--write` with Triton {triton.__version__}, and held",
        "to it by `make check-kernels`; no GPU has run them. MMA multiplies from a warp's",
        "registers, group (HGMMA, UTC…MMA) a whole tile from shared memory; TMA is UTMALDG.",
        "",
        "| kernel | type | target | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|" + "--:|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile everything, or what was asked for; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="kernels as the table names them; default all")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--target", choices=TARGETS, type=int, action="append")
    parser.add_argument("--table", type=Path, help="the file that holds the result, in Markdown")
    parser.add_argument("--write", action="store_true", help="write that file")
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    chosen = [
        (case.name, dtype, capability)
        for dtype in arguments.dtype or DTYPES
        for capability in targets
        for case in cases(dtype, capability)
        if not arguments.names or case.name in arguments.names
    ]
    rows = check_all(chosen)
    is_stale = False
    if arguments.table is not None:
        is_stale = not arguments.table.exists() or arguments.table.read_text() != table(rows)
        if arguments.write:
            arguments.table.write_text(table(rows))
        elif is_stale:
            sys.stdout.write(f"{arguments.table} is stale: FLAGS=--write brings it up to date\n")
    compiled = [row.compiled for row in rows if row.compiled is not None]
    sys.stdout.write(
        f"kernels={len({row.name for row in rows})} targets={len(targets)}"
        f" compiled={len(compiled)} spills={sum(result.spills > 0 for result in compiled)}\n"
    )
    return int(any(row.problems for row in rows) or (is_stale and not arguments.write))


if __name__ == "__main__":
    sys.exit(main())
