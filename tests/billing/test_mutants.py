"""Every planted mistake still has its place in the code (`make mutants` runs them)."""

from pathlib import Path

from tests.billing.mutants import MUTANTS, RESEARCH

ROOT = Path(__file__).parents[2]


def test_every_mutant_has_one_place_and_a_test() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(RESEARCH) == 11
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant.name
        assert (ROOT / mutant.tests).is_file(), mutant.name
