"""The highest rate at which the 99th percentile of TTFT stays within one second."""

import math
from collections.abc import Iterable

from tests.bench.peers.cells import BURST, Cell
from tests.bench.report import percentile

TTFT_LIMIT_S = 1.0
RESOLUTION = 1.06
"""The search ends when the lowest rate that fails is within this factor of the highest that holds."""
STEP = 1.4
"""How far to go where no rate has failed yet, or none has held."""
FIRST_RATE = 2.0
RATE_MIN = 0.1
NUM_PROBES_MAX = 8


def holds(cells: Iterable[Cell]) -> bool:
    """Whether one rate's runs, taken together, keep the promise; a failed request breaks it."""
    runs = list(cells)
    ttfts = [ttft for cell in runs for ttft in cell.ttft_s]
    has_failed = not ttfts or any(cell.num_failed for cell in runs)
    return not has_failed and percentile(ttfts, 0.99) <= TTFT_LIMIT_S


def bracket(cells: Iterable[Cell]) -> tuple[float | None, float | None]:
    """(highest rate that holds below every rate that fails, lowest rate that fails)."""
    by_rate: dict[float, list[Cell]] = {}
    for cell in cells:
        if cell.key.rate != BURST:
            by_rate.setdefault(cell.key.rate, []).append(cell)
    held = {rate: holds(runs) for rate, runs in by_rate.items()}
    failing = min((rate for rate, is_held in held.items() if not is_held), default=None)
    holding = [rate for rate, is_held in held.items() if is_held]
    below = [rate for rate in holding if failing is None or rate < failing]
    return max(below, default=None), failing


def next_rate(cells: Iterable[Cell]) -> float | None:
    """Which rate to try next; None when the highest one that holds is known well enough."""
    holding, failing = bracket(cells)
    if holding is None and failing is None:
        return FIRST_RATE
    if failing is None:
        assert holding is not None
        return round(holding * STEP, 2)
    if holding is None:
        return round(failing / STEP, 2) if failing > RATE_MIN else None
    middle = round(math.sqrt(holding * failing), 2)
    return middle if failing / holding > RESOLUTION and holding < middle < failing else None
