"""Whose step is next where several models share a device: one pure function, and what it remembers.

The same idea as inside of a model: virtual time keeps the shares equal, and among those who are near
enough to the least served, prompts go first, the shortest of them before all. A model without prompts
steps its streams as soon as the others have had a quantum more than it.

Source: virtual time per client is VTC's (arXiv 2401.00588); a quantum inside which another order
holds is DLPM's (arXiv 2501.14312).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Contender:
    """A model that has something to compute."""

    name: str
    prefill_key: float | None
    """Of its most urgent prompt, in seconds as requests are keyed; None where none waits."""
    virtual_s: float
    """Seconds of the device that it has had, lifted whenever it came back from idleness."""


def next_turn(contenders: Sequence[Contender], quantum_s: float) -> Contender:
    """Prefill first, then the least served; nobody runs ahead by more than a quantum and a step."""
    allowed_s = min(each.virtual_s for each in contenders) + quantum_s
    near = [each for each in contenders if each.virtual_s <= allowed_s]
    prefilling = [each for each in near if each.prefill_key is not None]
    if prefilling:
        return min(prefilling, key=lambda each: (each.prefill_key, each.virtual_s))
    return min(near, key=lambda each: each.virtual_s)


class Turns:
    """Seconds by model. Time away earns nothing: who comes back starts with the least served."""

    def __init__(self, quantum_s: float) -> None:
        self._quantum_s = quantum_s
        self._virtual_s: dict[str, float] = {}
        self._contending: set[str] = set()

    def next(self, prefill_keys: Mapping[str, float | None]) -> str:
        """Which of the models that have work steps now: {name: key of its first prompt}."""
        staying = [self._virtual_s[name] for name in prefill_keys if name in self._contending]
        least_s = min(staying, default=max(self._virtual_s.values(), default=0.0))
        for name in prefill_keys.keys() - self._contending:
            self._virtual_s[name] = max(self._virtual_s.get(name, -inf), least_s)
        self._contending = set(prefill_keys)
        contenders = [
            Contender(name, key, self._virtual_s[name]) for name, key in prefill_keys.items()
        ]
        return next_turn(contenders, self._quantum_s).name

    def charge(self, name: str, seconds: float) -> None:
        """The model's step took so long."""
        self._virtual_s[name] += seconds

    def forget(self, name: str) -> None:
        """The model is there no more."""
        self._virtual_s.pop(name, None)
        self._contending.discard(name)
