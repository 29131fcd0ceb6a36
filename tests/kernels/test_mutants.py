"""Every planted mistake still has its place, and some die here (`make mutants-kernels`: all)."""

import ast

import pytest

from tests.kernels.kill_mutants import TRIAL
from tests.kernels.mutants import MUTANTS
from tests.mutation import ROOT


def test_every_mutant_has_one_place_and_a_test() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant.name
        file, test = mutant.tests.split("::")
        tree = ast.parse((ROOT / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_a_sample_of_them_dies() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    assert TRIAL.run(MUTANTS, ["one page"]) == 0
