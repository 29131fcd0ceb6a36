"""What the cost model is asked: a request's place in the queue, its wait, and whether to believe it.

The model itself, `messages.CostModel`, is calibrated by a worker at start-up and travels in its
heartbeat. Source: research on prefill-priority scheduling; the key's ageing is that of
shortest-job-first with linear ageing, and the wait is Little's law.
"""

from dataclasses import dataclass
from math import inf, sqrt

from engine.messages import CostModel

UNCALIBRATED = CostModel(
    base_s=0.01, per_token_s=1e-4, per_prefill_context_s=1e-8, per_decode_context_s=1e-7
)
"""For a model of which no worker has spoken yet: right in order, not in seconds."""

ALPHA = 0.1
"""Seconds of prefill that a second of waiting is worth. 0: shortest first. Infinite: oldest first.

A request of work w is overtaken only by those that arrive within w / ALPHA seconds of it. On a
simulated 2-core CPU (2 x 600 requests of the small load at 2.9/s, 90 % of capacity) 0.05 has a mean
TTFT of 570 ms and a p99 of long prompts of 10.4 s; 0.1 has 569 ms and 9.3 s; 0.2 has 592 ms and 8.7 s.
"""


@dataclass(frozen=True, slots=True)
class QueuePrice:
    """What a request carries into the queue."""

    key: float
    """Static priority inside its tenant's queue; the least goes first."""
    work_s: float
    """Predicted seconds of its prefill's arithmetic: what a take charges the tenant in advance."""


def queue_price(
    cost_model: CostModel,
    num_tokens: int,
    *,
    arrival_ms: int,
    weight: float = 1.0,
    alpha: float = ALPHA,
) -> QueuePrice:
    """Price `num_tokens` of prompt, none of them cached.

    Comparing aged priorities `work - alpha · (now - arrival)` cancels `alpha · now`, so the key is
    fixed at submission and never refreshed.
    """
    work_s = cost_model.work_s(num_tokens)
    return QueuePrice(key=work_s / weight + alpha * arrival_ms / 1000, work_s=work_s)


def key_when_taken(key: float, waited_s: float, alpha: float = ALPHA) -> float:
    """The key inside a worker of a request that has waited `waited_s` in the queue.

    A request ages in its tenant's queue against that tenant's others. Among those of several tenants
    that a worker has taken it ages from the take on: the queue has already said whose turn it is, and
    the long wait behind one's own flood must not put another tenant's request last.
    """
    return key + alpha * waited_s


def affordable_tokens(
    cost_model: CostModel, seconds: float, *, num_before: int, num_cached: int, most: int
) -> int:
    """The tokens after `num_cached` ones, `most` at most, that fit into `seconds`.

    `num_before` other tokens are multiplied in the same step: within the ridge, more of them hide
    under the reading of the weights.
    """
    arithmetic_s, exposed = cost_model.per_token_s, 1 - cost_model.overlap
    square = cost_model.per_prefill_context_s / 2
    context_s = cost_model.per_prefill_context_s * num_cached
    # 1. beyond the ridge every token costs its whole arithmetic
    left_s = seconds - exposed * cost_model.weights_s - arithmetic_s * num_before
    num_tokens = _largest_root(square, arithmetic_s + context_s, left_s)
    room = cost_model.ridge_tokens - num_before
    if num_tokens >= room:
        return int(min(most, num_tokens))
    # 2. within it only what does not hide
    left_s = seconds - cost_model.weights_s - exposed * arithmetic_s * num_before
    return int(min(most, room, _largest_root(square, exposed * arithmetic_s + context_s, left_s)))


def _largest_root(square: float, linear: float, limit: float) -> float:
    """The largest x >= 0 with square · x² + linear · x <= limit, for factors that are not negative."""
    if limit <= 0:
        return 0.0
    # The usual formula with its numerator made rational: a tiny square must not cancel it away.
    denominator = linear + sqrt(linear * linear + 4 * square * limit)
    return 2 * limit / denominator if denominator > 0 else inf


class DrainRate:
    """Requests per second that leave the queue, smoothed over about `window_s` seconds."""

    __slots__ = ("_age_s", "_last_count", "_last_s", "_rate", "_window_s")

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._last_count: int | None = None
        self._last_s = 0.0
        self._age_s = 0.0
        self._rate = 0.0

    def observe(self, count: int, now_s: float) -> None:
        """`count` requests had left in all by `now_s`; a smaller one than before starts anew."""
        elapsed_s = now_s - self._last_s
        if self._last_count is not None and count >= self._last_count and elapsed_s > 0:
            rate = (count - self._last_count) / elapsed_s
            # Until the window is full, a plain mean: the first moment must not outweigh the rest.
            self._age_s = min(self._window_s, self._age_s + elapsed_s)
            self._rate += min(1.0, elapsed_s / self._age_s) * (rate - self._rate)
        self._last_count, self._last_s = count, now_s

    def wait_ms(self, position: int) -> int | None:
        """Milliseconds until the request at `position` is taken, or None while nothing leaves."""
        if self._rate < 1e-3:
            return None
        return round(1000 * (position + 1) / self._rate)


class Correction:
    """Predicted seconds, corrected by what the last steps really took.

    The factor follows measured / predicted; `is_trusted` says whether what it leaves is small enough
    to plan by. A planner that may not trust it counts tokens instead.
    """

    __slots__ = ("_error_s", "_measured_s", "_num_steps", "factor")

    RATE = 0.05
    """Weight of one step in the factor: about the last 20 steps count."""
    ERROR_RATE = 0.01
    """Weight of one step in the error: about the last 100 count."""
    STALL = 2.0
    """A step further off than this moves the factor no more: the process was not running."""
    ENOUGH = 20
    """Steps before a judgement; until then the calibration is believed."""
    ERROR_MAX = 0.25
    """Largest part of the measured seconds that predictions may miss by."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._error_s = 0.0
        self._measured_s = 0.0
        self._num_steps = 0

    def seconds(self, predicted_s: float) -> float:
        """The prediction, corrected."""
        return predicted_s * self.factor

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A step that was predicted (uncorrected) to take `predicted_s` took `measured_s`."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        error_s = abs(measured_s - self.seconds(predicted_s))
        self._num_steps += 1
        rate = max(self.ERROR_RATE, 1 / self._num_steps)
        self._error_s += rate * (error_s - self._error_s)
        self._measured_s += rate * (measured_s - self._measured_s)
        ratio = measured_s / predicted_s
        bounded = min(max(ratio, self.factor / self.STALL), self.factor * self.STALL)
        self.factor += self.RATE * (bounded - self.factor)

    @property
    def relative_error(self) -> float:
        """Seconds by which the last predictions missed, per second measured."""
        return self._error_s / self._measured_s if self._measured_s > 0 else 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether predictions are good enough to plan by."""
        return self._num_steps < self.ENOUGH or self.relative_error <= self.ERROR_MAX
