"""An independent idea of what the books should say. Exact rationals; shares no code with billing.

One organization: credit that came in by kind and end, versions of the price, budgets, holds.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil

SECOND = 1_000_000
PROJECT = "project"
KEYS: dict[str | None, str | None] = {"key_a": PROJECT, "key_b": PROJECT, "key_c": None, None: None}
"""Key to project; None is a browser."""


@dataclass(frozen=True)
class OraclePrice:
    """Nano-dollars a token, from some instant on. Not whole, so that rounding shows."""

    valid_from: int
    input: Fraction
    cached: Fraction
    output: Fraction

    @classmethod
    def per_million(cls, valid_from: int, *, input: int, cached: int, output: int) -> "OraclePrice":  # noqa: A002
        """From nano-dollars a million tokens."""
        million = 10**6
        parts = (Fraction(price, million) for price in (input, cached, output))
        return cls(valid_from, *parts)

    def of(self, uncached: int, cached: int, output: int) -> int:
        return ceil(uncached * self.input + cached * self.cached + output * self.output)


@dataclass
class OracleHold:
    key: str | None
    price: OraclePrice
    prompt: int
    authorized: int
    charge: int | None = None
    closed_at: int = 0

    @property
    def is_open(self) -> bool:
        return self.charge is None

    @property
    def amount(self) -> int:
        return self.price.of(self.prompt, 0, self.authorized)


@dataclass
class OracleLot:
    is_paid: bool
    left: int
    ends_at: float
    number: int


@dataclass
class OracleBudget:
    limit: int
    period: str

    def begins(self, now: int) -> int:
        if self.period == "total":
            return 0
        day = datetime.fromtimestamp(now // SECOND, UTC)
        first = datetime(day.year, day.month, 1 if self.period == "month" else day.day, tzinfo=UTC)
        return int(first.timestamp()) * SECOND


@dataclass
class Oracle:
    """What came in, what is held, what is owed."""

    lots: list[OracleLot] = field(default_factory=list)
    debt: int = 0
    """By how much more was taken than was there."""
    prices: list[OraclePrice] = field(default_factory=list)
    budgets: dict[str, OracleBudget] = field(default_factory=dict)
    """By key or project."""
    holds: dict[str, OracleHold] = field(default_factory=dict)
    is_frozen: bool = False
    _numbers: int = 0

    @property
    def posted(self) -> int:
        return sum(lot.left for lot in self.lots) - self.debt

    @property
    def free(self) -> int:
        """What is left of credit that nobody paid for."""
        return sum(lot.left for lot in self.lots if not lot.is_paid)

    @property
    def held(self) -> int:
        return sum(hold.amount for hold in self.holds.values() if hold.is_open)

    @property
    def available(self) -> int:
        return self.posted - self.held

    def price(self, now: int) -> OraclePrice:
        return max(
            (price for price in self.prices if price.valid_from <= now),
            key=lambda price: price.valid_from,
        )

    def standing(self, scope: str, now: int) -> tuple[int, int]:
        """What a budget's key or project has spent in its period, and holds."""
        mine = [
            hold
            for hold in self.holds.values()
            if hold.key is not None and scope in (hold.key, KEYS[hold.key])
        ]
        begins = self.budgets[scope].begins(now)
        spent = sum(hold.charge or 0 for hold in mine if hold.closed_at >= begins)
        return spent, sum(hold.amount for hold in mine if hold.is_open)

    def left_for(self, key: str | None, now: int) -> tuple[int, bool]:
        """What a key may still hold, and whether it is a budget that says so."""
        lefts = [
            self.budgets[scope].limit - sum(self.standing(scope, now))
            for scope in ((key, KEYS[key]) if key is not None else ())
            if scope in self.budgets
        ]
        tightest = min(lefts, default=self.available)
        return min(tightest, self.available), tightest < self.available

    def fitting(
        self, key: str | None, prompt: int, output: int, num_choices: int, now: int
    ) -> int | None:
        """How much output may be authorized; None when not even one token for each choice."""
        left, _ = self.left_for(key, now)
        for candidate in range(output, 0, -num_choices):
            if self.price(now).of(prompt, 0, candidate) <= left:
                return candidate
        return None

    def give(self, amount: int, *, is_paid: bool, ends_at: int | None = None) -> None:
        swallowed = min(amount, self.debt)
        self.debt -= swallowed
        self._numbers += 1
        end = float("inf") if ends_at is None else ends_at
        self.lots.append(OracleLot(is_paid, amount - swallowed, end, self._numbers))

    def take(self, amount: int, *, is_paid_first: bool = False) -> None:
        """Gifts first, then what ends first, then the oldest; or what was paid first."""
        order = sorted(
            self.lots, key=lambda lot: (lot.is_paid != is_paid_first, lot.ends_at, lot.number)
        )
        for lot in order:
            part = min(lot.left, amount)
            lot.left -= part
            amount -= part
        self.debt += amount

    def expire(self, now: int) -> None:
        """What is over goes, as far as nobody holds it."""
        for lot in sorted(self.lots, key=lambda lot: (lot.ends_at, lot.number)):
            if lot.ends_at <= now:
                lot.left -= max(0, min(lot.left, self.available))

    def close(self, request_id: str, charge: int, now: int) -> None:
        hold = self.holds[request_id]
        hold.charge, hold.closed_at = charge, now
        self.take(charge)
