"""Compiles every Triton kernel ahead of time for the GPUs we target; it needs no GPU.

    python -m kernels.check [NAME ...] [--dtype bf16] [--target 90] [--table FILE [--write] [--all]]

Prints registers, shared memory, spills and the instructions that matter of every kernel, data type
and target. Exits 1 if one does not compile, spills, takes more than the chip has, or lacks an
instruction that its speed rests on. It catches what the interpreter cannot: tiles too small for a
tensor core, types that do not match, shared memory that overflows. `--table` names the file that
holds the result and exits 1 if it says anything else; with `--write` it is written. Rows of that
file which still hold, by their keys, are taken from it, unless `--all` wants everything compiled.
A process of its own: it must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from kernels.check_cases import DTYPES, TARGETS, Case, cases
from kernels.check_table import COLUMNS, Compiled, Place, Row, kept_rows, key_of, table


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for one GPU and read the assembler's account of it."""
    names: list[str] = case.kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    types = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    source = ASTSource(case.kernel, types, case.constants, attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
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


def check_case(case: Case, dtype: str, capability: int) -> Row:
    """Compile one case and tell what is wrong with it."""
    try:
        result = compile_case(case, capability)
    except Exception as failure:
        # Whatever the compiler raises is the answer; the other kernels are still asked.
        innermost: BaseException = failure
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        return Row(
            *(case.name, dtype, capability, None, (f"does not compile: {innermost}",), key_of(case))
        )
    problems = tuple(result.problems(case, capability, dtype))
    return Row(case.name, dtype, capability, result, problems, key_of(case))


def check_place(place: Place) -> Row:
    """The same in a process of the pool, to which a kernel does not travel."""
    chosen = cases(place.dtype, place.capability)
    case = next(case for case in chosen if case.name == place.name)
    return check_case(case, place.dtype, place.capability)


def check_all(chosen: list[tuple[Place, Case]], kept: dict[Place, Row]) -> list[Row]:
    """Compile what is not kept, as much at once as there are processors; print a line for each."""
    layout = "{:44} {:5} {:7} {:>9} {:>7} {:>6} {:>5} {:>5} {:>7} {:>4} {:>7}  {}"
    sys.stdout.write(layout.format("kernel", "type", "target", *COLUMNS, "key") + "\n")
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        compiled = pool.map(check_place, [place for place, _ in chosen if place not in kept])
        for place, _ in chosen:
            row = kept.get(place) or next(compiled)
            sys.stdout.write(layout.format(*row.cells) + f"  {', '.join(row.problems)}\n")
            sys.stdout.flush()
            rows.append(row)
    return rows


def rows_that_hold(path: Path, chosen: list[tuple[Place, Case]]) -> dict[Place, Row]:
    """Rows of the table at `path` that need not be compiled again."""
    written = kept_rows(path)
    held = {}
    for place, case in chosen:
        key, compiled = written.get(place, ("", None))
        if compiled is not None and key == key_of(case):
            problems = compiled.problems(case, place.capability, place.dtype)
            held[place] = Row(
                place.name, place.dtype, place.capability, compiled, tuple(problems), key
            )
    return held


def main() -> int:
    """Compile everything, or what was asked for; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="kernels as the table names them; default all")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--target", choices=TARGETS, type=int, action="append")
    parser.add_argument("--table", type=Path, help="the file that holds the result, in Markdown")
    parser.add_argument("--write", action="store_true", help="write that file")
    parser.add_argument("--all", action="store_true", help="compile also what it holds already")
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    chosen = [
        (Place(case.name, dtype, capability), case)
        for dtype in arguments.dtype or DTYPES
        for capability in targets
        for case in cases(dtype, capability)
        if not arguments.names or case.name in arguments.names
    ]
    is_kept = arguments.table is not None and not arguments.all
    kept = rows_that_hold(arguments.table, chosen) if is_kept else {}
    rows = check_all(chosen, kept)
    is_stale = False
    if arguments.table is not None:
        is_stale = not arguments.table.exists() or arguments.table.read_text() != table(rows)
        if arguments.write:
            arguments.table.write_text(table(rows))
        elif is_stale:
            sys.stdout.write(f"{arguments.table} is stale: FLAGS=--write brings it up to date\n")
    sys.stdout.write(f"{len(rows) - len(kept)} compiled now, {len(kept)} rows still hold\n")
    compiled = [row.compiled for row in rows if row.compiled is not None]
    sys.stdout.write(
        f"kernels={len({row.name for row in rows})} targets={len(targets)}"
        f" compiled={len(compiled)} spills={sum(result.spills > 0 for result in compiled)}\n"
    )
    return int(any(row.problems for row in rows) or (is_stale and not arguments.write))


if __name__ == "__main__":
    sys.exit(main())
