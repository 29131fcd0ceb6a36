"""The table of faults is complete, and every test that it names exists."""

import re
from pathlib import Path

from tests.billing.money_faults import FAULTS

ROOT = Path(__file__).parents[2]
OTHER_THAN_MONEY = {"P24"}
"""One pool for logs and keys: what it breaks is the log-in."""


def test_every_fault_with_money_has_a_test() -> None:
    numbers = {number for key in FAULTS for number in key.split(", ")}
    products = {f"P{number}" for number in range(1, 28)} - OTHER_THAN_MONEY
    assert numbers == products | {f"F{number}" for number in range(1, 19)} | {"F2b"}
    for _, tests in FAULTS.values():
        assert tests
        for test in tests:
            path, name = test.split("::")
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), test
