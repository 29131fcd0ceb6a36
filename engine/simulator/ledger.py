"""What happened to every request of a simulated (or measured) run, as columns."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.simulator.trace import TracedRequest


@dataclass(slots=True)
class RunLedger:
    """Times in seconds by request, in the order of the trace; NaN where it has not happened."""

    requests: list[TracedRequest]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    """The latest token; in the end the last one."""
    num_cached: NDArray[np.int64]
    gaps_s: list[NDArray[np.float64]] = field(default_factory=list)
    """Pauses between two tokens of one stream, of all streams."""
    refused: list[int] = field(default_factory=list)
    """Requests that could never run on this machine."""
    num_steps: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0

    @classmethod
    def of(cls, requests: list[TracedRequest]) -> "RunLedger":
        """Before anything has happened."""
        nothing = np.full(len(requests), np.nan)
        zeros = np.zeros(len(requests), dtype=np.int64)
        return cls(requests, nothing, nothing.copy(), zeros)

    def note_tokens(self, indices: NDArray[np.intp], now_s: float) -> None:
        """Each of these requests got a token."""
        before = self.last_s[indices]
        has_one = ~np.isnan(before)
        self.gaps_s.append(now_s - before[has_one])
        self.first_s[indices[~has_one]] = now_s
        self.last_s[indices] = now_s
        self.end_s = max(self.end_s, now_s)

    @property
    def arrivals_s(self) -> NDArray[np.float64]:
        """By request."""
        return np.array([request.arrival_s for request in self.requests])

    @property
    def mean_step_s(self) -> float:
        """Of all machines' steps."""
        return self.busy_s / max(1, self.num_steps)

    @property
    def is_complete(self) -> NDArray[np.bool_]:
        """By request: not refused."""
        kept = np.ones(len(self.requests), dtype=bool)
        kept[self.refused] = False
        return kept
