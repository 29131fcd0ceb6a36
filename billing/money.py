"""Money: signed 64-bit integer nano-dollars, and the price of a request. No float touches it.

A nano-dollar (1e-9 USD) is exact for any price per token; the range is ±9.2 billion dollars.
"""

import re
from typing import NewType, Protocol

from billing.errors import InvalidAmount

NanoUsd = NewType("NanoUsd", int)

NANO_PER_DOLLAR = 1_000_000_000
TOKENS_PER_PRICE = 1_000_000
"""Prices are nano-dollars per so many tokens."""
MAX_NANO_USD = 2**63 - 1
DECIMAL_PLACES = 9

_DECIMAL = re.compile(r"([+-]?)(\d{1,10})(?:\.(\d{1,9}))?")


class TokenPrices(Protocol):
    """Nano-dollars per million tokens; cached input never costs more than fresh input."""

    @property
    def input_nano_usd_per_million(self) -> int: ...  # noqa: D102
    @property
    def cached_input_nano_usd_per_million(self) -> int: ...  # noqa: D102
    @property
    def output_nano_usd_per_million(self) -> int: ...  # noqa: D102


def cost(price: TokenPrices, *, uncached_input: int, cached_input: int, output: int) -> NanoUsd:
    """What so many tokens cost together: exact, then rounded up to a nano-dollar once.

    One rounding on the cumulative total means that no way of slicing a request changes its bill,
    and that a use is never free. Raises InvalidAmount on a negative count.
    """
    if uncached_input < 0 or cached_input < 0 or output < 0:
        raise InvalidAmount("A count of tokens cannot be negative.")
    total = (
        uncached_input * price.input_nano_usd_per_million
        + cached_input * price.cached_input_nano_usd_per_million
        + output * price.output_nano_usd_per_million
    )
    return NanoUsd(-(-total // TOKENS_PER_PRICE))


def affordable_output(price: TokenPrices, *, input_tokens: int, available: int) -> int | None:
    """The most output tokens that `available` covers after the whole, uncached input.

    None: output is free, so any number. Negative: not even the input is covered.
    """
    left = available * TOKENS_PER_PRICE - input_tokens * price.input_nano_usd_per_million
    if left < 0:
        return -1
    if price.output_nano_usd_per_million == 0:
        return None
    return left // price.output_nano_usd_per_million


def format_usd(amount: int) -> str:
    """Dollars with nine places: `99.998732100`, `-0.000000001`."""
    dollars, nano = divmod(abs(amount), NANO_PER_DOLLAR)
    sign = "-" if amount < 0 else ""
    return f"{sign}{dollars}.{nano:0{DECIMAL_PLACES}d}"


def parse_usd(text: str) -> NanoUsd:
    """Exact nano-dollars of a decimal such as `12.5` or `-0.000000001`; raises InvalidAmount."""
    match = _DECIMAL.fullmatch(text.strip())
    if match is None or not text.isascii():
        raise InvalidAmount("This is not an amount in dollars with at most nine decimal places.")
    sign, dollars, fraction = match.groups()
    amount = int(dollars) * NANO_PER_DOLLAR + int((fraction or "").ljust(DECIMAL_PLACES, "0"))
    if amount > MAX_NANO_USD:
        raise InvalidAmount("This amount is too large.")
    return NanoUsd(-amount if sign == "-" else amount)
