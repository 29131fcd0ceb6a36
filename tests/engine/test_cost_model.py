"""Keys order a queue as aged priorities would, waits follow the pace, and bad models are found out."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model import (
    ALPHA,
    UNCALIBRATED,
    Correction,
    DrainRate,
    affordable_tokens,
    key_when_taken,
    queue_price,
)
from engine.messages import CostModel, StepWork

MODEL = CostModel(
    base_s=0.01, per_token_s=1e-3, per_prefill_context_s=1e-6, per_decode_context_s=1e-6
)


@given(
    first=st.tuples(st.integers(1, 8192), st.integers(0, 10**6)),
    second=st.tuples(st.integers(1, 8192), st.integers(0, 10**6)),
    now_ms=st.integers(10**6, 2 * 10**6),
)
def test_static_keys_order_requests_as_aged_priorities_do_at_any_time(
    first: tuple[int, int], second: tuple[int, int], now_ms: int
) -> None:
    def aged(num_tokens: int, arrival_ms: int) -> float:
        return MODEL.work_s(num_tokens) - ALPHA * (now_ms - arrival_ms) / 1000

    keys = [queue_price(MODEL, n, arrival_ms=t).key for n, t in (first, second)]
    expected = aged(*first) - aged(*second)
    assert keys[0] - keys[1] == pytest.approx(expected, abs=1e-9)


def test_a_short_prompt_overtakes_a_long_one_only_for_a_while() -> None:
    long = queue_price(MODEL, 4096, arrival_ms=0)
    soon = queue_price(MODEL, 64, arrival_ms=1_000)
    late = queue_price(MODEL, 64, arrival_ms=round(1000 * long.work_s / ALPHA))
    assert soon.key < long.key < late.key


def test_weight_makes_work_cheaper_but_not_smaller() -> None:
    plain, heavy = (queue_price(MODEL, 512, arrival_ms=0, weight=w) for w in (1.0, 4.0))
    assert heavy.key == pytest.approx(plain.key / 4)
    assert heavy.work_s == plain.work_s == MODEL.work_s(512)


def test_without_calibration_more_tokens_still_cost_more() -> None:
    prices = [queue_price(UNCALIBRATED, n, arrival_ms=0).key for n in (1, 64, 4096)]
    assert prices == sorted(set(prices))


roofs = st.builds(
    CostModel,
    base_s=st.floats(0, 0.01),
    per_token_s=st.floats(1e-6, 1e-3),
    per_prefill_context_s=st.floats(0, 1e-6),
    per_decode_context_s=st.floats(0, 1e-6),
    weights_s=st.floats(0, 0.02),
    overlap=st.floats(0, 1),
    per_sample_s=st.floats(0, 1e-4),
)


@given(roofs, st.floats(-0.01, 0.3), st.integers(0, 600), st.integers(0, 4000))
def test_a_chunk_is_the_largest_that_its_seconds_allow(
    model: CostModel, seconds: float, num_before: int, num_cached: int
) -> None:
    def taken_s(num_tokens: int) -> float:
        pairs = num_tokens * num_cached + num_tokens * num_tokens / 2
        return model.products_s(num_before + num_tokens) + model.per_prefill_context_s * pairs

    num_tokens = affordable_tokens(
        model, seconds, num_before=num_before, num_cached=num_cached, most=3000
    )
    assert 0 <= num_tokens <= 3000
    if num_tokens > 0:
        assert taken_s(num_tokens) <= seconds * (1 + 1e-9) + 1e-12
    if num_tokens < 2999:
        assert taken_s(num_tokens + 2) > seconds


def test_products_are_bound_by_memory_before_the_ridge_and_by_arithmetic_after_it() -> None:
    roof = CostModel(
        base_s=0.0,
        per_token_s=1e-4,
        per_prefill_context_s=0.0,
        per_decode_context_s=0.0,
        weights_s=0.01,
    )
    assert roof.ridge_tokens == pytest.approx(100)
    assert roof.products_s(1) == roof.products_s(99) == 0.01
    assert roof.products_s(200) == pytest.approx(0.02)
    assert roof.step_s(StepWork(num_tokens=0)) == 0.0


def test_a_slower_machine_is_slower_in_everything() -> None:
    work = StepWork(num_tokens=90, num_samples=7, prefill_pairs=4e4, decode_context=900.0)
    roof = msgspec.structs.replace(MODEL, weights_s=0.02, overlap=0.3, per_sample_s=1e-3)
    assert roof.scaled(1.7).step_s(work) == pytest.approx(1.7 * roof.step_s(work))
    assert roof.scaled(1.7).ridge_tokens == pytest.approx(roof.ridge_tokens)


def test_the_wait_follows_the_pace_of_the_queue() -> None:
    rate = DrainRate(window_s=10)
    assert rate.wait_ms(0) is None
    for second in range(60):
        rate.observe(4 * second, float(second))
    assert rate.wait_ms(7) == pytest.approx(2_000)
    for second in range(60, 160):
        rate.observe(4 * 59, float(second))
    assert rate.wait_ms(0) is None or rate.wait_ms(0) > 10_000


def test_a_counter_that_starts_anew_is_no_negative_pace() -> None:
    rate = DrainRate()
    for second, count in enumerate((100, 110, 0, 10)):
        rate.observe(count, float(second))
    assert rate.wait_ms(9) == pytest.approx(1_000, rel=0.1)


def test_a_constant_error_is_learned_and_then_trusted() -> None:
    correction = Correction()
    for _ in range(400):
        correction.observe(0.1, 0.17)
    assert correction.seconds(0.1) == pytest.approx(0.17, rel=0.01)
    assert correction.is_trusted


def test_a_model_that_is_wrong_at_random_is_not_trusted() -> None:
    draw = random.Random(1)
    correction = Correction()
    for _ in range(400):
        correction.observe(0.1, 0.1 * draw.choice((0.3, 2.5)))
    assert not correction.is_trusted


def test_one_stall_does_not_unsettle_what_many_steps_have_taught() -> None:
    correction = Correction()
    for _ in range(200):
        correction.observe(0.1, 0.1)
    correction.observe(0.1, 10.0)
    assert correction.factor < 1.06
    for _ in range(1000):
        correction.observe(0.1, 0.1)
    assert correction.is_trusted


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    correction = Correction()
    correction.observe(0.1, 0.0)
    correction.observe(0.0, 0.1)
    assert correction.factor == 1.0
    assert correction.relative_error == 0.0


def test_an_idle_first_moment_does_not_outweigh_the_rest() -> None:
    rate = DrainRate(window_s=10)
    rate.observe(0, 0.0)
    rate.observe(0, 0.01)
    rate.observe(20, 1.0)
    assert rate.wait_ms(19) == pytest.approx(1_000, rel=0.05)


def test_among_taken_requests_one_ages_from_the_take_on() -> None:
    flooding = queue_price(MODEL, 200, arrival_ms=0).key
    arrived = queue_price(MODEL, 50, arrival_ms=600_000).key
    assert flooding < arrived, "in one queue ten minutes of waiting outrank a shorter prompt"
    assert key_when_taken(flooding, waited_s=600.0) > key_when_taken(arrived, waited_s=0.0)
