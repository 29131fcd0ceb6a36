"""The verdict: each target of a benchmark, reached or missed, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is to be: at least `bound`, or at most."""

    figure: str
    bound: float
    words: str
    unit: str = " x"
    is_most: bool = False

    def is_reached(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        return value <= self.bound if self.is_most else value >= self.bound

    def told(self, value: float | None) -> str:
        """The target with what was measured."""
        limit = "at most" if self.is_most else "at least"
        found = "" if value is None else f" {value:.2f}{self.unit}"
        return f"{self.words}{found} (target: {limit} {self.bound:g}{self.unit})"


def verdict(figures: Mapping[str, float], targets: Sequence[Target]) -> list[str]:
    """How many were reached, then one line for each: reached, missed, not measured."""
    found = [(target, figures.get(target.figure)) for target in targets]
    known = [(target, value) for target, value in found if value is not None]
    reached = [f"reached: {t.told(value)}" for t, value in known if t.is_reached(value)]
    missed = [f"missed: {t.told(value)}" for t, value in known if not t.is_reached(value)]
    unknown = [f"not measured: {t.told(None)}" for t, value in found if value is None]
    total = f"{len(reached)} of {len(targets)} targets reached, {len(missed)} missed"
    return [total, *reached, *missed, *unknown]
