"""Utilisation over the last seconds, from totals that only grow: an idle machine shows as idle."""

from collections import deque
from collections.abc import Callable

from engine.costs.step_meter import NO_STEPS, StepTotals
from engine.messages import Utilisation
from engine.output import EngineStats

WINDOW_S = 10.0


class RecentUse:
    """Remembers the totals of the last `WINDOW_S` seconds. For one thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._seen: deque[tuple[float, StepTotals]] = deque([(now_s(), NO_STEPS)])

    def utilisation(self, stats: EngineStats) -> Utilisation:
        """What the heartbeat says."""
        now_s, totals = self._now_s(), stats.totals
        self._seen.append((now_s, totals))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        elapsed_s = max(now_s - since_s, 1e-9)
        return Utilisation(
            ridge_tokens=stats.cost_model.ridge_tokens if stats.cost_model else 0.0,
            compute=min(1.0, (totals.compute_s - before.compute_s) / elapsed_s),
            bandwidth=min(1.0, (totals.bandwidth_s - before.bandwidth_s) / elapsed_s),
            compute_s_total=totals.compute_s,
            bandwidth_s_total=totals.bandwidth_s,
            compute_bound_s_total=totals.compute_bound_s,
            bandwidth_bound_s_total=totals.bandwidth_bound_s,
            neither_bound_s_total=totals.neither_s,
            prediction_error=stats.prediction_error,
            is_prediction_trusted=stats.is_prediction_trusted,
        )
