"""An independent idea of what the books should say. Exact rationals; shares no code with billing."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

INPUT, CACHED, OUTPUT = Fraction(2_000), Fraction(1, 2), Fraction(6_000_000_333, 10**6)
"""Nano-dollars a token. Not whole, so that rounding shows."""


def price_of(uncached: int, cached: int, output: int) -> int:
    return ceil(uncached * INPUT + cached * CACHED + output * OUTPUT)


@dataclass
class OracleHold:
    prompt: int
    authorized: int
    charge: int | None = None

    @property
    def is_open(self) -> bool:
        return self.charge is None

    @property
    def amount(self) -> int:
        return price_of(self.prompt, 0, self.authorized)


@dataclass
class Oracle:
    """One organization: what came in by kind, in order, and every hold."""

    free: int = 0
    """What is left of credit that nobody paid for."""
    paid: int = 0
    """What is left of bought credit; negative when more was taken than was there."""
    holds: dict[str, OracleHold] = field(default_factory=dict)

    @property
    def posted(self) -> int:
        return self.free + self.paid

    @property
    def held(self) -> int:
        return sum(hold.amount for hold in self.holds.values() if hold.is_open)

    @property
    def available(self) -> int:
        return self.posted - self.held

    def fitting(self, prompt: int, output: int, num_choices: int) -> int | None:
        """How much output may be authorized; None when not even one token for each choice."""
        for candidate in range(output, 0, -num_choices):
            if price_of(prompt, 0, candidate) <= self.available:
                return candidate
        return None

    def give(self, amount: int, is_paid: bool) -> None:
        debt = min(amount, max(0, -self.posted))
        self.paid += debt
        if is_paid:
            self.paid += amount - debt
        else:
            self.free += amount - debt

    def take(self, amount: int) -> None:
        from_free = min(self.free, amount)
        self.free -= from_free
        self.paid -= amount - from_free

    def close(self, request_id: str, charge: int) -> None:
        self.holds[request_id].charge = charge
        self.take(charge)
