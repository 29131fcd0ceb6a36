"""What the engine learns from its own steps: how far to believe predictions, and what was busy.

Two limits bound a step: arithmetic, and reading weights and caches. The seconds that each would take
by itself, at the rates that calibration measured, over the seconds that passed, is its utilisation.
"""

from dataclasses import dataclass

import numpy as np

from engine.batch import StepBatch
from engine.cost_model import Correction
from engine.messages import CostModel, StepWork

NEITHER_SHARE = 0.5
"""A step of which neither limit explains so much was bound by something else: launches, Python."""
RESCALE = 0.02
"""The corrected model follows its factor in steps of this size, so that it seldom changes."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Seconds since the engine started; they only grow."""

    compute_s: float = 0.0
    """What the arithmetic of all steps takes at the calibrated rate."""
    bandwidth_s: float = 0.0
    """What reading their weights, keys and values takes at the calibrated rate."""
    compute_bound_s: float = 0.0
    """Steps that arithmetic bound most."""
    bandwidth_bound_s: float = 0.0
    """Steps that reading bound most."""
    neither_s: float = 0.0
    """Steps of which neither explains half."""


NO_STEPS = StepTotals()


class StepMeter:
    """Watches every step of one engine."""

    def __init__(self, calibrated: CostModel | None) -> None:
        self.totals = NO_STEPS
        self.corrected = calibrated
        """The calibrated model at the speed of the last steps; None where there is none."""
        self._calibrated = calibrated
        self._correction = Correction()
        self._scale = 1.0

    @property
    def is_trusted(self) -> bool:
        """Whether steps may be planned by `corrected`."""
        return self._calibrated is not None and self._correction.is_trusted

    @property
    def relative_error(self) -> float:
        """Of the predictions of the last steps, after correction."""
        return self._correction.relative_error

    @property
    def planning_model(self) -> CostModel | None:
        """What the next step is planned by; None: count tokens instead."""
        return self.corrected if self.is_trusted else None

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """The step took so long."""
        model = self._calibrated
        if model is None or batch.is_empty or seconds <= 0:
            return
        work = work_of(batch)
        self._count(model, work, seconds)
        if batch.chunks:  # only such steps are planned in seconds
            self._correction.observe(model.step_s(work), seconds)
            factor = self._correction.factor
            if abs(factor / self._scale - 1) > RESCALE:
                self._scale, self.corrected = factor, model.scaled(factor)

    def _count(self, model: CostModel, work: StepWork, seconds: float) -> None:
        compute_s = min(seconds, model.arithmetic_s(work))
        bandwidth_s = min(seconds, model.reading_s(work))
        is_neither = max(compute_s, bandwidth_s) < NEITHER_SHARE * seconds
        is_compute = not is_neither and compute_s >= bandwidth_s
        is_bandwidth = not is_neither and not is_compute
        before = self.totals
        self.totals = StepTotals(
            compute_s=before.compute_s + compute_s,
            bandwidth_s=before.bandwidth_s + bandwidth_s,
            compute_bound_s=before.compute_bound_s + is_compute * seconds,
            bandwidth_bound_s=before.bandwidth_bound_s + is_bandwidth * seconds,
            neither_s=before.neither_s + is_neither * seconds,
        )


def work_of(batch: StepBatch) -> StepWork:
    """What the batch computes, as the cost model counts it."""
    num_chunks = len(batch.chunks)
    starts = batch.query_start[: num_chunks + 1].astype(np.float64)
    lens = np.diff(starts)
    pairs = float((lens * (batch.context_lens[:num_chunks] - lens / 2)).sum())
    pairs += float((batch.drafts.num_tokens * batch.context_lens[num_chunks:]).sum())
    return StepWork(
        num_tokens=len(batch.token_ids),
        num_samples=batch.num_rows,
        prefill_pairs=pairs,
        decode_context=float(batch.context_lens[num_chunks:].sum()),
    )
