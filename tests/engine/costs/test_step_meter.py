"""What a step teaches: where the machine stood, and how far its predictions can be believed."""

import numpy as np
import pytest

from engine.costs.step_meter import StepTotals, work_of
from engine.costs.utilisation import WINDOW_S, RecentUse
from engine.engine import Engine
from engine.messages import CostModel, StepWork
from engine.model_runner import ModelRunner
from engine.output import EngineStats
from engine.settings import EngineSettings
from tests.engine.driver import request
from tests.engine.fake_model import FakeModel, expected_output

COST = CostModel(
    base_s=0.0,
    per_token_s=1e-3,
    per_prefill_context_s=0.0,
    per_decode_context_s=0.0,
    weights_s=0.05,
)


STEP_S = 0.15
"""150 tokens by the calibrated model."""


class TimedEngine:
    """An engine whose clock says that each step takes what `step_s` makes of its work."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.now_us = 1_000_000
        self.slowness = 1.0
        self.overhead_s = 0.0
        self.work: list[StepWork] = []
        model = FakeModel()
        runner = ModelRunner(model, num_blocks)
        run = runner.run

        def timed(batch: object, *rest: object) -> object:
            work = work_of(batch)  # type: ignore[arg-type]  # whatever the runner is given
            self.work.append(work)
            self.now_us += round((COST.step_s(work) * self.slowness + self.overhead_s) * 1e6)
            return run(batch, *rest)  # type: ignore[arg-type]  # passed on

        runner.run = timed  # type: ignore[method-assign, assignment]  # wrapped for the test
        self.engine = Engine(
            runner,
            EngineSettings(max_step_tokens=1024, step_s=STEP_S),
            num_blocks,
            cost_model=COST,
            now_us=lambda: self.now_us,
        )

    def run(self, *lengths: int, num_tokens: int = 1) -> EngineStats:
        for index, length in enumerate(lengths):
            name = f"{len(self.work)}-{index}"
            self.engine.add(request(name, [(index + len(self.work)) % 500] * length, num_tokens))
        while self.engine.has_work:
            self.engine.step()
        return self.engine.stats


def test_a_batch_is_counted_as_the_cost_model_counts() -> None:
    timed = TimedEngine()
    timed.run(100, num_tokens=3)
    prefill, first, second = timed.work
    assert prefill == StepWork(num_tokens=100, num_samples=1, prefill_pairs=5000.0)
    assert first == StepWork(num_tokens=1, num_samples=1, decode_context=101.0)
    assert second == StepWork(num_tokens=1, num_samples=1, decode_context=102.0)


def test_a_long_prefill_is_bound_by_compute_and_a_decode_by_bandwidth() -> None:
    timed = TimedEngine()
    prefilled = timed.run(200).totals
    assert prefilled.compute_bound_s == pytest.approx(0.2)
    assert prefilled.bandwidth_bound_s == prefilled.neither_s == 0.0
    decoded = timed.run(1, num_tokens=10).totals
    assert decoded.bandwidth_bound_s == pytest.approx(0.5)
    assert decoded.compute_s == pytest.approx(0.2 + 10 * 1e-3)
    assert decoded.bandwidth_s == pytest.approx(0.05 + 0.5)


def test_a_step_of_which_most_is_overhead_is_bound_by_neither() -> None:
    timed = TimedEngine()
    timed.overhead_s = 0.3
    totals = timed.run(100).totals
    assert totals.neither_s == pytest.approx(0.4)
    assert totals.compute_bound_s == totals.bandwidth_bound_s == 0.0


def test_a_machine_that_became_slower_gets_shorter_chunks() -> None:
    timed = TimedEngine()
    timed.slowness = 2.0
    for _ in range(100):
        timed.run(64)
    stats = timed.engine.stats
    assert stats.cost_model is not None
    assert stats.cost_model.per_token_s == pytest.approx(2e-3, rel=0.05)
    assert stats.is_prediction_trusted
    timed.work.clear()
    timed.run(1000)
    assert max(work.num_tokens for work in timed.work) * 2e-3 <= 0.3 * 1.05


def test_a_model_that_is_often_wrong_is_dropped_for_a_budget_in_tokens() -> None:
    timed = TimedEngine()
    for index in range(300):
        timed.slowness = (0.3, 2.5)[index % 2]
        timed.run(64)
    assert not timed.engine.stats.is_prediction_trusted
    timed.work.clear()
    timed.run(400)
    assert [work.num_tokens for work in timed.work][:2] == [128, 128]
    assert timed.work[0].num_tokens * COST.per_token_s <= STEP_S


def test_without_calibration_everything_still_runs() -> None:
    engine = Engine(ModelRunner(FakeModel(), 8), EngineSettings(), 8)
    engine.add(request("a", [1, 2, 3], 2))
    tokens = []
    while engine.has_work:
        frames = engine.step().frames["node"]
        tokens += [token for frame in frames for token in frame.token_ids]
    assert tokens == expected_output([1, 2, 3], 2)
    assert engine.stats.totals == StepTotals()
    assert not engine.stats.is_prediction_trusted


def test_an_idle_machine_shows_as_idle() -> None:
    now = [0.0]
    recent = RecentUse(lambda: now[0])
    busy = EngineStats(cost_model=COST, totals=StepTotals(compute_s=4.0, bandwidth_s=1.0))
    now[0] = 5.0
    use = recent.utilisation(busy)
    assert (use.compute, use.bandwidth) == pytest.approx((0.8, 0.2))
    assert use.ridge_tokens == pytest.approx(50)
    for moment in np.arange(5.5, 5.5 + WINDOW_S + 1, 0.5):
        now[0] = float(moment)
        use = recent.utilisation(busy)
    assert (use.compute, use.bandwidth) == (0.0, 0.0)
    assert use.compute_s_total == 4.0
