"""The table of compiled kernels is current, and a row of it that no longer holds is noticed.

`test_triton.py` starts these tests in a process that imports Triton before our kernels, which leave it
alone where torch has no CUDA.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.triton_support import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("test_triton.py runs these with Triton", allow_module_level=True)

from kernels import attention_tile, decode_splits
from kernels.check import rows_that_hold
from kernels.check_cases import DTYPES, TARGETS, Case, cases
from kernels.check_table import Compiled, Place, Row, kept_rows, key_of, table

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/triton-kernels.md"


def all_cases() -> list[tuple[Place, Case]]:
    return [
        (Place(case.name, dtype, capability), case)
        for dtype in DTYPES
        for capability in TARGETS
        for case in cases(dtype, capability)
    ]


def test_every_row_still_holds_and_none_is_wrong() -> None:
    if not kept_rows(TABLE):
        pytest.skip("another Triton wrote the table: `make check-kernels` compiles it anew")
    chosen = all_cases()
    held = rows_that_hold(TABLE, chosen)
    stale = [place for place, _ in chosen if place not in held]
    assert stale == [], "make check-kernels FLAGS=--write"
    assert table([held[place] for place, _ in chosen]) == TABLE.read_text()
    assert {row.problems for row in held.values()} == {()}


def test_a_key_changes_with_whatever_the_figures_follow_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in cases("bf16", 90) if case.name == "decode_g4_d128")
    key = key_of(case)
    others = [
        replace(case, num_warps=8),
        replace(case, num_stages=1),
        replace(case, max_registers=None),
        replace(case, constants=case.constants | {"TILE": 32}),
        replace(case, types=case.types | {"q_ptr": "*fp16"}),
    ]
    assert len({key, *map(key_of, others)}) == 6
    callees: list[Any] = [attention_tile.attend_tiles, decode_splits._merge]
    for called in callees:
        with monkeypatch.context() as patch:
            patch.setattr(called, "_src", called._src + "    # why\n")
            assert key_of(case) == key, "a comment"
            patch.setattr(called, "_src", called._src + "    pass\n")
            assert key_of(case) != key, "what it calls has changed"


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    compiled = Compiled(*range(7, 15))
    row = Row("decode_g4_d128", "bf16", 90, compiled, (), "0123456789")
    path = tmp_path / "table.md"
    path.write_text(table([row, replace(row, name="failed", compiled=None)]))
    assert kept_rows(path) == {Place(row.name, "bf16", 90): ("0123456789", compiled)}
    path.write_text(path.read_text().replace("with Triton ", "with Triton 0."))
    assert kept_rows(path) == {}, "of another compiler"
