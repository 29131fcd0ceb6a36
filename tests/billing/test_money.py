from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InvalidAmount
from billing.money import affordable_output, cost, format_usd, parse_usd

counts = st.integers(0, 10**7)
prices = st.integers(0, 10**12)


@dataclass(frozen=True)
class Prices:
    input_nano_usd_per_million: int
    cached_input_nano_usd_per_million: int
    output_nano_usd_per_million: int


@given(prices, prices, prices, counts, counts, counts)
def test_a_cost_is_the_exact_sum_rounded_up_once(
    a: int, b: int, c: int, uncached: int, cached: int, output: int
) -> None:
    price = Prices(max(a, b), min(a, b), c)
    exact = Fraction(max(a, b), 10**6) * uncached + Fraction(min(a, b), 10**6) * cached
    exact += Fraction(c, 10**6) * output
    assert cost(price, uncached_input=uncached, cached_input=cached, output=output) == ceil(exact)


@given(prices, prices, prices, counts, counts)
def test_a_cached_token_is_never_dearer(a: int, b: int, c: int, prompt: int, output: int) -> None:
    price = Prices(max(a, b), min(a, b), c)
    fresh = cost(price, uncached_input=prompt, cached_input=0, output=output)
    for cached in (prompt // 2, prompt):
        assert (
            cost(price, uncached_input=prompt - cached, cached_input=cached, output=output) <= fresh
        )


@given(prices, prices, counts, st.integers(0, 10**15))
def test_what_is_affordable_fits_and_one_more_does_not(
    a: int, c: int, prompt: int, available: int
) -> None:
    price = Prices(a, 0, c)
    most = affordable_output(price, input_tokens=prompt, available=available)
    if most is None:
        assert c == 0
    elif most < 0:
        assert cost(price, uncached_input=prompt, cached_input=0, output=0) > available
    else:
        assert cost(price, uncached_input=prompt, cached_input=0, output=most) <= available
        assert cost(price, uncached_input=prompt, cached_input=0, output=most + 1) > available


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_dollars_survive_being_printed(amount: int) -> None:
    assert parse_usd(format_usd(amount)) == amount


@pytest.mark.parametrize(
    "text", ["", "1e3", "NaN", "0.0000000001", "--1", "1,5", "99999999999", "\u0661", "inf", "1."]
)
def test_what_is_no_exact_amount_is_refused(text: str) -> None:
    with pytest.raises(InvalidAmount):
        parse_usd(text)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(InvalidAmount):
        cost(Prices(1, 1, 1), uncached_input=-1, cached_input=0, output=0)
