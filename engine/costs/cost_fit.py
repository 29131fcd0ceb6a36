"""Fits the roofline of `messages.CostModel` to the measured seconds of synthetic steps.

For a given arithmetic rate everything else is linear, so the rate is searched on a grid and the
rest is non-negative least squares of relative errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.messages import CostModel, StepWork

NUM_RATES = 120
"""Grid points over two decades: neighbours differ by 4 %."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step and the seconds that it took at best."""

    work: StepWork
    seconds: float


def fit_roofline(steps: Sequence[MeasuredStep], weights_s: float) -> CostModel:
    """The cost model that predicts `steps` with the least relative error.

    `weights_s` is what reading the weights takes: their bytes at the rate of memory. No step can
    have taken less, so a greater one (weights that stay in a cache) is lowered to the fastest step.
    """
    weights_s = min([weights_s, *(step.seconds for step in steps)])
    slowest = max(step.seconds / step.work.num_tokens for step in steps)
    fits = [
        _fit_at(steps, weights_s, per_token_s)
        for per_token_s in np.geomspace(slowest / 1000, slowest, NUM_RATES).tolist()
    ]
    return min(fits, key=lambda fit: fit[0])[1]


def relative_errors(cost_model: CostModel, steps: Sequence[MeasuredStep]) -> list[float]:
    """predicted / measured - 1 of each step."""
    return [cost_model.step_s(step.work) / step.seconds - 1 for step in steps]


def _fit_at(
    steps: Sequence[MeasuredStep], weights_s: float, per_token_s: float
) -> tuple[float, CostModel]:
    """(squared error, the best model) where one token's arithmetic takes `per_token_s`."""
    seconds = np.array([step.seconds for step in steps])
    arithmetic = per_token_s * np.array([step.work.num_tokens for step in steps])
    greater, lesser = np.maximum(weights_s, arithmetic), np.minimum(weights_s, arithmetic)
    columns = np.array([_linear_parts(step.work) for step in steps])
    matrix = np.column_stack([lesser, columns]) / seconds[:, None]
    target = 1 - greater / seconds
    factors, error = _non_negative(matrix, target)
    if factors[0] > 1:  # more than one after the other cannot be
        factors[1:], error = _non_negative(matrix[:, 1:], target - matrix[:, 0])
        factors[0] = 1.0
    exposed, base_s, prefill_s, decode_s, sample_s = factors.tolist()
    model = CostModel(
        base_s=base_s,
        per_token_s=per_token_s,
        per_prefill_context_s=prefill_s,
        per_decode_context_s=decode_s,
        weights_s=weights_s,
        overlap=1 - exposed,
        per_sample_s=sample_s,
    )
    return error, model


def _linear_parts(work: StepWork) -> list[float]:
    return [1.0, work.prefill_pairs, work.decode_context, float(work.num_samples)]


def _non_negative(matrix: Matrix, target: Matrix) -> tuple[Matrix, float]:
    """Least squares without negative factors: what would be one is left out. (factors, error)"""
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        if not used or (found >= 0).all():
            factors = np.zeros(matrix.shape[1])
            factors[used] = found
            return factors, float(((matrix @ factors - target) ** 2).sum())
        used.pop(int(found.argmin()))
