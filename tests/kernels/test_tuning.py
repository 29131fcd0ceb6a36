"""Tables of tiles: what was measured here goes before what the product brings, and before rules."""

import json
from pathlib import Path

import pytest
import torch

from kernels import tuning
from kernels.benchmarks.tune import by_rules
from kernels.paged_prefill_attention import chosen_tile, rule_of_tile
from kernels.tuning import (
    MEASURED,
    RULES,
    SHIPPED,
    Tile,
    TuningTable,
    shape_of,
    table_for,
    table_name,
)

H100 = "NVIDIA H100 80GB HBM3"
SHAPE = shape_of(torch.bfloat16, 128, 4, 1000)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_tables_that_come_with_the_product_say_that_rules_wrote_them(gpu: str) -> None:
    shipped = TuningTable.read(SHIPPED / f"{gpu.lower()}.json")
    assert shipped is not None
    assert shipped.origin == RULES
    assert shipped == by_rules(gpu)
    assert shipped.find(SHAPE) == rule_of_tile(torch.bfloat16, 128, 4, 1000, 9)


def test_what_was_measured_here_goes_first(tmp_path: Path) -> None:
    path = tmp_path / table_name(H100, "3.7.1")
    shipped = table_for(H100, "3.7.1", tmp_path)
    assert shipped is not None
    assert shipped.gpu == "H100"
    measured = TuningTable(H100, "3.7.1", MEASURED, {SHAPE.key: Tile(64, 4, 3)})
    measured.write(path)
    assert table_for(H100, "3.7.1", tmp_path) == measured
    assert table_for(H100, "3.6.0", tmp_path) == shipped, "of another compiler"
    assert table_for("Tesla T4", "3.7.1", tmp_path) is None
    for content in ("{", "[]", '{"gpu": 1}', json.dumps({"tiles": {"x": {"rows": 1, "more": 2}}})):
        path.write_text(content)
        assert table_for(H100, "3.7.1", tmp_path) == shipped, content


def test_a_launch_takes_the_tile_of_the_table_and_else_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = TuningTable(H100, "", MEASURED, {SHAPE.key: Tile(32, 4, 3)})
    monkeypatch.setattr(tuning, "_active", [table])
    assert chosen_tile(torch.bfloat16, 128, 4, 513, 9) == Tile(32, 4, 3)
    assert chosen_tile(torch.bfloat16, 128, 4, 512, 9) == rule_of_tile(
        torch.bfloat16, 128, 4, 512, 9
    )


def test_the_cpu_has_no_table(tmp_path: Path) -> None:
    assert tuning.enable(tmp_path, torch.device("cpu")) is None
