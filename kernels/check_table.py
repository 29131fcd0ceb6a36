"""What the assembler says of every kernel: the table that `kernels.check` writes and holds to.

Each row ends with a key: a hash of all that its figures follow from, which are the source of the
kernel and of what it calls, its types, its compile-time parameters and the compiler's options. A
row whose key is still that of its case need not be compiled again; one whose key is another is
stale. Comments, docstrings and the places of functions in their files are no part of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import triton

from kernels.check_cases import TARGETS, Case

REGISTERS_OF_A_PROCESSOR = 65_536
COLUMNS = ("registers", "shared", "spills", "MMA", "group", "128-bit", "TMA", "release")
KEY_DIGITS = 10


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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `compiled` is None where it does not compile."""

    name: str
    dtype: str
    capability: int
    compiled: Compiled | None
    problems: tuple[str, ...]
    key: str

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has them."""
        figures = ("failed",) * len(COLUMNS) if self.compiled is None else astuple(self.compiled)
        return (self.name, self.dtype, f"sm_{self.capability}", *map(str, figures), self.key)


@dataclass(frozen=True, slots=True)
class Place:
    """Which row of the table."""

    name: str
    dtype: str
    capability: int


def kept_rows(path: Path) -> dict[Place, tuple[str, Compiled]]:
    """Key and figures of what the table at `path` has of this very compiler."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if f"with Triton {triton.__version__}, " not in text:
        return {}
    found = {}
    for line in re.findall(
        r"^\| (\w+ \| \w+ \| sm_\d+ (?:\| \d+ ){8}\| \w+) \|$", text, re.MULTILINE
    ):
        name, dtype, target, *figures, key = line.split(" | ")
        place = Place(name, dtype, int(target.removeprefix("sm_")))
        found[place] = (key, Compiled(*map(int, figures)))
    return found


def table(rows: list[Row]) -> str:
    """All rows as Markdown, with the version of the compiler."""
    lines = [
        "# Every Triton kernel, compiled ahead of time",
        "",
        f"Written by `make check-kernels FLAGS=--write` with Triton {triton.__version__}, and held",
        "to it by `make check-kernels`; no GPU has run them. MMA multiplies from a warp's",
        "registers, group (HGMMA, UTC…MMA) a whole tile from shared memory; TMA is UTMALDG. The",
        "key is a hash of all that a row follows from: a row is compiled again when it changes.",
        "",
        "| kernel | type | target | " + " | ".join(COLUMNS) + " | key |",
        "|---|---|---|" + "--:|" * len(COLUMNS) + "---|",
    ]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def key_of(case: Case) -> str:
    """A hash of all that the figures of a case follow from, but for the compiler's version."""
    kernels: dict[str, Any] = {}
    _collect(case.kernel, kernels)
    sources = [_code(kernels[name].src) for name in sorted(kernels)]
    options = (case.num_warps, case.num_stages, case.max_registers)
    constants = sorted((name, str(value)) for name, value in case.constants.items())
    parts = (sources, sorted(case.types.items()), constants, case.aligned, options)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:KEY_DIGITS]


def _collect(kernel: Any, found: dict[str, Any]) -> None:
    """A kernel and those that it calls, by name."""
    function = kernel.fn
    found[function.__name__] = kernel
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, triton.JITFunction) and name not in found:
            _collect(value, found)


@functools.cache
def _code(source: str) -> str:
    """The source of a function without comments and docstring."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return ast.unparse(definition)
