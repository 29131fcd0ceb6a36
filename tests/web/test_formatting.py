"""Numbers on pages are exact."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.money import NanoUsd
from web import formatting

amounts = st.integers(-(2**63) + 1, 2**63 - 1).map(NanoUsd)


@given(amounts)
def test_both_halves_of_an_amount_are_the_exact_amount(amount: NanoUsd) -> None:
    for halves in (
        formatting.dollars_and_rest(amount),
        formatting.leading_zeros_and_rest(amount),
        (formatting.trimmed_dollars(amount), ""),
    ):
        text = "".join(halves).replace("$", "").replace(",", "").replace("−", "-")
        assert Decimal(text) * 10**9 == amount


@pytest.mark.parametrize(
    ("amount", "halves"),
    [
        (0, ("$0.000000000", "")),
        (1, ("$0.00000000", "1")),
        (19_820, ("$0.0000", "19820")),
        (1_230_000_000, ("$", "1.230000000")),
        (-19_820, ("−$0.0000", "19820")),
    ],
)
def test_a_cost_is_cut_before_its_first_digit_that_counts(
    amount: int, halves: tuple[str, str]
) -> None:
    assert formatting.leading_zeros_and_rest(NanoUsd(amount)) == halves


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1_000, "1K"), (12_345, "12.3K"), (4_100_000, "4.1M"), (10**9, "1B")],
)
def test_compact_counts(value: int, text: str) -> None:
    assert formatting.compact_count(value) == text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(None, "–"), (0, "<1 ms"), (84_900, "84 ms"), (1_320_000, "1.32 s"), (61_000_000, "61.00 s")],
)
def test_durations_and_what_was_never_measured(microseconds: int | None, text: str) -> None:
    assert formatting.duration(microseconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59, "just now"), (60, "1 min ago"), (7_200, "2 h ago"), (86_400, "1 day ago")],
)
def test_ages(seconds: int, text: str) -> None:
    assert formatting.ago(0, seconds * 1_000_000) == text
    assert formatting.ago(None, seconds) == "never"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "1 second"), (1, "1 second"), (90, "90 seconds"), (91, "2 minutes")]
)
def test_a_wait_is_never_said_too_short(seconds: int, text: str) -> None:
    assert formatting.wait(seconds) == text
