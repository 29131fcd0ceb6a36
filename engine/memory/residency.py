"""Which models are in a worker's memory: one pure function, state in, decision out.

Loaded are those that were asked for. A model that is wanted and does not fit has the least recently
used idle ones unloaded for it; where all are busy, it waits, and after a while the one that has been
served longest gives way when its requests have ended. Idle ones leave after a set time, if one is set.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded."""

    name: str
    num_bytes: int
    idle_s: float | None
    """Since when no request of it has been here; None while there is one."""
    loaded_s: float
    """For how long it has been loaded."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A model that is hosted and not loaded."""

    name: str
    num_bytes: int
    """What it needs at least."""
    wanted_s: float | None
    """For how long requests have waited for it; None where none does."""
    is_new: bool = False
    """It was never loaded here: it is loaded without being asked for, where there is room."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next; at most one of the two."""

    unload: str | None = None
    load: str | None = None


NOTHING = Decision()
SETTLED_S = 2.0
"""A model that has just been loaded is not idle: its requests are on their way to it."""


def decide(
    residents: Sequence[Resident],
    absents: Sequence[Absent],
    *,
    free_bytes: int,
    idle_unload_s: float,
    swap_after_s: float,
) -> Decision:
    """The next thing to do, or nothing. `idle_unload_s` 0: idle models stay."""
    wanted = sorted(
        (each for each in absents if each.wanted_s is not None),
        key=lambda each: -(each.wanted_s or 0.0),
    )
    for absent in wanted:
        decision = _make_room(absent, residents, free_bytes, swap_after_s)
        if decision != NOTHING:
            return decision
    for absent in absents:
        if absent.is_new and (absent.num_bytes <= free_bytes or not residents):
            return Decision(load=absent.name)
    if idle_unload_s > 0:
        for resident in residents:
            if resident.idle_s is not None and resident.idle_s >= max(idle_unload_s, SETTLED_S):
                return Decision(unload=resident.name)
    return NOTHING


def _make_room(
    absent: Absent, residents: Sequence[Resident], free_bytes: int, swap_after_s: float
) -> Decision:
    """Load it where it fits (or where nothing else is, so that the attempt says what is missing)."""
    if absent.num_bytes <= free_bytes or not residents:
        return Decision(load=absent.name)
    idle = [each for each in residents if each.idle_s is not None and each.idle_s >= SETTLED_S]
    is_enough = free_bytes + sum(each.num_bytes for each in idle) >= absent.num_bytes
    if is_enough or (idle and (absent.wanted_s or 0.0) >= swap_after_s):
        return Decision(unload=max(idle, key=lambda each: each.idle_s or 0.0).name)
    served = [each for each in residents if each.loaded_s >= swap_after_s]
    if served and (absent.wanted_s or 0.0) >= swap_after_s:
        return Decision(unload=max(served, key=lambda each: each.loaded_s).name)
    return NOTHING
