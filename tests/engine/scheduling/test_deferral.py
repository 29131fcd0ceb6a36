"""Decodes ride where it is cheap, wait where prefills gain by it, and no stream ever notices."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import CostModel, StepWork
from engine.scheduling.deferral import decode_seconds, decodes_ride, prefill_budget_s
from engine.scheduling.plan import DecodeState, Limits, PlannerState
from engine.scheduling.planner import plan
from tests.engine.scheduling.test_planner import LIMITS, decodes, prefill, state

RIDGE = CostModel(
    base_s=0.001,
    per_token_s=1e-4,
    per_prefill_context_s=0.0,
    per_decode_context_s=1e-8,
    weights_s=0.01,
)
"""The ridge is at 100 tokens: fewer decodes cost a prefill step next to nothing of their own."""
ROOMY = replace(LIMITS, gap_s=1.0, step_s=0.05)


def waiting(num_decodes: int, *, silent_s: float = 0.0, ahead_s: float = 9.0) -> PlannerState:
    """Three prompts wait for their prefill while streams, all far ahead of their pace, decode."""
    streams = decodes([10] * num_decodes, silent_s=silent_s, ahead_s=ahead_s)
    return state([prefill(0.0, 300) for _ in range(3)], streams, num_blocks=4096)


def rides(current: PlannerState, limits: Limits = ROOMY) -> bool:
    made = plan(current, limits, RIDGE)
    assert made.chunks
    assert len(made.decodes) in (0, len(current.decodes))
    return len(made.decodes) > 0


def test_below_the_ridge_decodes_ride_and_above_it_they_wait() -> None:
    assert rides(waiting(8))
    assert not rides(waiting(200))


def test_a_stream_that_was_silent_too_long_rides() -> None:
    assert not rides(waiting(200, silent_s=0.5))
    assert rides(waiting(200, silent_s=0.95))


def test_streams_that_fall_behind_their_pace_ride() -> None:
    assert rides(waiting(200, ahead_s=0.0))
    one_late = waiting(200)
    one_late.decodes.ahead_s[0] = -0.1
    assert not rides(one_late), "one late stream does not outweigh three first tokens"


def test_streams_of_a_tenant_that_is_ahead_wait_for_others_but_not_beyond_the_gap() -> None:
    late = waiting(200, ahead_s=0.0)
    late.decodes.is_ahead[:] = True
    assert not rides(late)
    silent = waiting(200, ahead_s=0.0, silent_s=0.95)
    silent.decodes.is_ahead[:] = True
    assert rides(silent)


def test_where_memory_is_scarce_nothing_is_put_off() -> None:
    crowded = replace(waiting(200), num_blocks=100_000)
    assert rides(crowded)


def test_without_prefills_every_decode_runs() -> None:
    idle = state([], decodes([10] * 200, ahead_s=9.0), num_blocks=4096)
    assert len(plan(idle, ROOMY, RIDGE).decodes) == 200


def test_without_a_cost_model_decodes_always_ride() -> None:
    assert len(plan(waiting(200), ROOMY, None).decodes) == 200


def test_a_deferred_step_preempts_nobody() -> None:
    full = decodes([65] * 200, ahead_s=9.0)
    current = state([prefill(0.0, 64)], full, num_blocks=203)
    limits = replace(ROOMY, crowded_share=1.0)
    made = plan(current, limits, RIDGE)
    if len(made.decodes) == 0:
        assert made.preempted_decodes == []


streams = st.builds(
    lambda count, context, silent_s, ahead_s: decodes(
        [context] * count, silent_s=silent_s, ahead_s=ahead_s
    ),
    st.integers(1, 300),
    st.integers(2, 2000),
    st.floats(0, 1.2),
    st.floats(-1, 5),
)


@settings(max_examples=300)
@given(streams, st.integers(1, 900), st.integers(0, 40))
def test_no_stream_is_silent_for_longer_than_the_gap_by_being_put_off(
    decoding: DecodeState, num_tokens: int, num_behind: int
) -> None:
    current = replace(
        state([prefill(0.0, num_tokens)], decoding, num_blocks=20_000),
        num_unstarted=1 + num_behind,
    )
    chunks = StepWork(num_tokens, num_samples=1, prefill_pairs=num_tokens * num_tokens / 2)
    if decodes_ride(current, chunks, ROOMY, RIDGE):
        return
    # This step without them, and the next one, as long, with them.
    alone_s = RIDGE.base_s + max(RIDGE.weights_s, RIDGE.per_token_s * num_tokens)
    together = num_tokens + len(decoding)
    mixed_s = RIDGE.base_s + max(RIDGE.weights_s, RIDGE.per_token_s * together)
    mixed_s += RIDGE.per_decode_context_s * float(decoding.context_lens.sum())
    assert decoding.silent_s.max() + alone_s + mixed_s <= ROOMY.gap_s + 1e-9
    late = np.count_nonzero(decoding.ahead_s < alone_s)
    assert late * alone_s <= (1 + num_behind) * (mixed_s - alone_s) + 1e-9


@pytest.mark.parametrize("num_decodes", [1, 64, 512])
@pytest.mark.parametrize("silent_s", [0.0, 0.2, 5.0])
def test_the_prefill_budget_keeps_streams_within_the_gap(num_decodes: int, silent_s: float) -> None:
    decoding = decodes([2000] * num_decodes, silent_s=silent_s)
    decodes_s = decode_seconds(decoding, RIDGE)
    budget = prefill_budget_s(decoding, LIMITS, RIDGE)
    assert budget > 0
    least = LIMITS.step_s / 4
    assert silent_s + budget + decodes_s <= max(LIMITS.gap_s, silent_s + decodes_s + least) + 1e-9
    if silent_s + decodes_s < LIMITS.gap_s - LIMITS.step_s:
        assert budget >= LIMITS.step_s


def test_with_nothing_to_disturb_a_step_is_as_long_as_an_arrival_may_wait() -> None:
    assert prefill_budget_s(decodes([]), LIMITS, RIDGE) == LIMITS.idle_step_s
