"""The plan of one step, for any state: what it may never do, and what it must do."""

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.messages import CostModel
from engine.scheduling.deferral import prefill_budget_s
from engine.scheduling.plan import Chunk, DecodeState, Limits, Plan, PlannerState, PrefillState
from engine.scheduling.planner import plan

SIZE = 64
LIMITS = Limits(
    block_size=SIZE,
    max_step_tokens=512,
    untimed_step_tokens=256,
    step_s=0.15,
    idle_step_s=0.3,
    gap_s=0.4,
    pace_s=0.1,
    ride_share=0.6,
    crowded_share=0.85,
    prefill_share=0.7,
    paused_share=0.25,
    backfill_lock_s=5.0,
    num_kept_slots=1,
)
COST = CostModel(
    base_s=0.01, per_token_s=1e-3, per_prefill_context_s=1e-6, per_decode_context_s=1e-6
)


def prefill(
    key: float = 1.0,
    num_remaining: int = 100,
    *,
    num_computed: int = 0,
    num_growth: int = 1,
    order: int = -1,
    num_slots: int = 1,
    waited_s: float = 0.0,
    surplus_s: float = 0.0,
) -> PrefillState:
    """Waiting, or admitted where it has an order."""
    num_held = num_computed // SIZE
    num_all = -(-(num_computed + num_remaining) // SIZE)
    return PrefillState(
        key=key,
        surplus_s=surplus_s,
        num_computed=num_computed,
        num_remaining=num_remaining,
        num_held=num_held,
        num_evictable_hits=0,
        num_reserved=num_all - num_held + num_growth,
        num_slots=num_slots,
        is_kept_for=True,
        num_output_left=256,
        is_admitted=order >= 0,
        order=order,
        waited_s=waited_s,
    )


def decodes(
    contexts: list[int],
    orders: list[int] | None = None,
    num_growth: int = 1,
    *,
    silent_s: float = 0.0,
    ahead_s: float = 0.0,
) -> DecodeState:
    """Decoding sequences; one whose last block is full needs another."""
    context_lens = np.array(contexts, dtype=np.int32)
    num_held = -(-(context_lens - 1) // SIZE)
    num_new = (context_lens > num_held * SIZE).astype(np.int32)
    return DecodeState(
        context_lens=context_lens,
        num_new_blocks=num_new,
        num_held=num_held.astype(np.int32),
        num_reserved=(num_new + num_growth).astype(np.int32),
        num_generated=np.ones(len(contexts), dtype=np.int32),
        num_output_left=np.full(len(contexts), 256, dtype=np.int32),
        num_preemptions=np.zeros(len(contexts), dtype=np.int32),
        order=np.array(orders or range(100, 100 + len(contexts)), dtype=np.int64),
        silent_s=np.full(len(contexts), silent_s),
        ahead_s=np.full(len(contexts), ahead_s),
        is_ahead=np.zeros(len(contexts), dtype=bool),
    )


def state(
    prefills: list[PrefillState],
    decoding: DecodeState | None = None,
    *,
    num_blocks: int = 64,
    num_free_slots: int = 16,
) -> PlannerState:
    """A consistent one: what is not held is free."""
    decoding = decodes([]) if decoding is None else decoding
    held = sum(p.num_held for p in prefills if p.is_admitted) + int(decoding.num_held.sum())
    return PlannerState(
        prefills=prefills,
        decodes=decoding,
        num_unstarted=len(prefills),
        num_free_blocks=num_blocks - held,
        num_blocks=num_blocks,
        num_free_slots=num_free_slots,
        expected_output_tokens=256.0,
    )


@st.composite
def states(draw: st.DrawFn) -> PlannerState:
    """Nearly full as the normal case."""
    needs_a_block = st.integers(0, 10).map(lambda full: full * SIZE + 65)
    contexts = draw(st.lists(st.integers(2, 700) | needs_a_block, max_size=6))
    num_waiting = draw(st.integers(0, 4))
    num_paused = draw(st.integers(0, 3))
    orders = draw(st.permutations(range(len(contexts) + num_paused)))
    decoding = decodes(
        contexts,
        list(orders[num_paused:]),
        draw(st.integers(0, 6)),
        silent_s=draw(st.sampled_from([0.0, 0.05, 0.3])),
        ahead_s=draw(st.sampled_from([-0.1, 0.05, 9.0])),
    )
    lengths = st.integers(1, 900)
    prefills = [
        prefill(
            draw(st.floats(0, 2)),
            draw(lengths),
            num_slots=draw(st.integers(1, 3)),
            waited_s=draw(st.sampled_from([0.0, 1.0, 60.0])),
        )
        for _ in range(num_waiting)
    ]
    prefills += [
        prefill(
            draw(st.floats(0, 2)),
            draw(lengths),
            num_computed=SIZE * draw(st.integers(0, 8)),
            order=orders[index],
        )
        for index in range(num_paused)
    ]
    held = sum(p.num_held for p in prefills) + int(decoding.num_held.sum())
    longest = max([1, *(-(-(p.num_computed + p.num_remaining) // SIZE) for p in prefills)])
    longest = max([longest, *(-(-context // SIZE) for context in contexts)])
    num_blocks = max(held, longest) + draw(st.integers(0, 6))
    return state(prefills, decoding, num_blocks=num_blocks, num_free_slots=draw(st.integers(3, 8)))


def new_blocks(prefill_state: PrefillState, num_tokens: int) -> int:
    """Counted independently of the planner."""
    held = prefill_state.num_held * SIZE
    end = prefill_state.num_computed + num_tokens
    return len(range(held, end, SIZE))


def seconds(current: PlannerState, made: Plan) -> float:
    """Predicted seconds of a step with the chunks alone, token by token."""
    total = COST.base_s
    for chunk in made.chunks:
        start = current.prefills[chunk.index].num_computed
        reads = (start + token + 0.5 for token in range(chunk.num_tokens))
        total += sum(COST.per_token_s + COST.per_prefill_context_s * read for read in reads)
    return total


@settings(max_examples=400)
@given(states(), st.booleans())
def test_a_plan_takes_no_more_than_there_is(current: PlannerState, is_calibrated: bool) -> None:
    made = plan(current, LIMITS, COST if is_calibrated else None)
    taken = sum(new_blocks(current.prefills[c.index], c.num_tokens) for c in made.chunks)
    assert taken <= max(0, current.num_free_blocks - int(current.decodes.num_new_blocks.sum()))
    taken += int(current.decodes.num_new_blocks[made.decodes].sum())
    given_back = sum(current.prefills[index].num_held for index in made.preempted_prefills)
    given_back += int(current.decodes.num_held[made.preempted_decodes].sum())
    is_alone = len(current.decodes) <= 1 and not made.preempted_decodes
    assert taken <= current.num_free_blocks + given_back or is_alone
    num_tokens = sum(chunk.num_tokens for chunk in made.chunks) + len(made.decodes)
    assert num_tokens <= max(LIMITS.max_step_tokens, len(current.decodes))
    started = [c for c in made.chunks if not current.prefills[c.index].is_admitted]
    slots = sum(current.prefills[chunk.index].num_slots for chunk in started)
    assert slots <= current.num_free_slots


@settings(max_examples=400)
@given(states())
def test_a_step_stays_within_its_seconds(current: PlannerState) -> None:
    made = plan(current, LIMITS, COST)
    budget = prefill_budget_s(current.decodes, LIMITS, COST)
    if len(made.chunks) > 1 or (made.chunks and made.chunks[0].num_tokens > SIZE):
        assert seconds(current, made) <= budget * 1.001


@settings(max_examples=400)
@given(states())
def test_everyone_is_computed_or_preempted_once_and_the_first_one_never_is(
    current: PlannerState,
) -> None:
    made = plan(current, LIMITS, COST)
    chunks = [chunk.index for chunk in made.chunks]
    assert len(set(chunks)) == len(chunks)
    assert not set(chunks) & set(made.preempted_prefills)
    touched = sorted([*made.decodes.tolist(), *made.preempted_decodes])
    assert touched == list(range(len(current.decodes))) or (made.chunks and not touched)
    assert all(current.prefills[index].is_admitted for index in made.preempted_prefills)
    orders = [p.order for p in current.prefills if p.is_admitted]
    orders += current.decodes.order.tolist()
    preempted = [current.prefills[index].order for index in made.preempted_prefills]
    preempted += current.decodes.order[made.preempted_decodes].tolist()
    assert not preempted or min(orders) not in preempted


@settings(max_examples=400)
@given(states())
def test_where_there_is_work_something_happens(current: PlannerState) -> None:
    assume(current.prefills or len(current.decodes))
    made = plan(current, LIMITS, COST)
    assert not made.is_empty or made.preempted_prefills or made.preempted_decodes


@settings(max_examples=400)
@given(states())
def test_a_request_starts_only_on_blocks_that_are_promised_to_nobody(
    current: PlannerState,
) -> None:
    made = plan(current, LIMITS, COST)
    admitted = [p for p in current.prefills if p.is_admitted]
    assume(admitted or len(current.decodes))
    started = [current.prefills[c.index] for c in made.chunks]
    started = [p for p in started if not p.is_admitted]
    promised = int(current.decodes.num_reserved.sum()) + sum(p.num_reserved for p in admitted)
    if started:
        wanted = sum(p.num_reserved for p in started)
        assert promised + wanted <= current.num_free_blocks


def test_the_least_key_goes_first_and_the_step_ends_with_its_prompt() -> None:
    waiting = [prefill(2.0, 500), prefill(1.0, 100)]
    made = plan(state(waiting), LIMITS, COST)
    assert made.chunks == [Chunk(1, 100)], "the first token does not wait for the other prompt"


def test_a_chunk_joins_where_those_behind_gain_more_than_first_tokens_lose() -> None:
    dear_steps = structs.replace(COST, base_s=0.05)
    pair = state([prefill(1.0, 40), prefill(2.0, 60)])
    crowd = replace(pair, num_unstarted=12)
    assert plan(pair, LIMITS, dear_steps).chunks == [Chunk(0, 40)], "60 ms lost for 50 ms saved"
    assert plan(crowd, LIMITS, dear_steps).chunks == [Chunk(0, 40), Chunk(1, 60)]
    weights = structs.replace(COST, weights_s=0.2)
    assert len(plan(pair, LIMITS, weights).chunks) == 2, "below the ridge it costs nothing"
    assert len(plan(pair, LIMITS, None).chunks) == 2, "nobody knows what it costs"


def test_the_rest_of_the_budget_goes_to_the_next_where_no_prompt_ends() -> None:
    waiting = [prefill(1.0, 5000, num_computed=SIZE * 30, order=0), prefill(2.0, SIZE)]
    made = plan(state(waiting, num_blocks=256), LIMITS, COST)
    assert [chunk.index for chunk in made.chunks] == [0, 1]


def test_tenants_that_are_ahead_make_no_other_wait_for_their_chunks() -> None:
    flood = [prefill(9.0, 60, surplus_s=8.0) for _ in range(20)]
    made = plan(state([*flood, prefill(1.0, 60)]), LIMITS, structs.replace(COST, base_s=0.05))
    assert made.chunks == [Chunk(20, 60)]
    alone = plan(state(flood), LIMITS, structs.replace(COST, base_s=0.05))
    assert len(alone.chunks) > 1


def test_the_last_slots_are_for_tenants_that_run_little() -> None:
    greedy, modest = prefill(1.0, 60)._replace(is_kept_for=False), prefill(2.0, 60)
    streams = decodes([10] * 3)
    taken = plan(state([greedy, modest], streams, num_free_slots=1), LIMITS, COST)
    assert taken.chunks == [Chunk(1, 60)]
    assert plan(state([greedy], streams, num_free_slots=2), LIMITS, COST).chunks == [Chunk(0, 60)]
    assert plan(state([greedy], num_free_slots=1), LIMITS, COST).chunks, (
        "an idle machine keeps none"
    )


def test_a_started_prefill_pauses_for_a_shorter_one() -> None:
    long = prefill(5.0, 5000, num_computed=640, order=0)
    short = prefill(0.1, 60)
    made = plan(state([long, short], num_blocks=256), LIMITS, COST)
    assert made.chunks[0] == Chunk(1, 60)


def test_a_long_context_makes_a_chunk_shorter() -> None:
    near = plan(state([prefill(1.0, 2000)], num_blocks=999), LIMITS, COST)
    far = prefill(1.0, 2000, num_computed=SIZE * 300, order=0)
    assert plan(state([far], num_blocks=999), LIMITS, COST).chunks[0].num_tokens > 0
    assert (
        plan(state([far], num_blocks=999), LIMITS, COST).chunks[0].num_tokens
        < near.chunks[0].num_tokens
    )


def test_a_small_request_passes_a_big_one_that_lacks_memory() -> None:
    big, small = prefill(0.0, 640, num_growth=9), prefill(1.0, 60)
    made = plan(state([big, small], decodes([600, 700]), num_blocks=32), LIMITS, COST)
    assert [chunk.index for chunk in made.chunks] == [1]


def test_nothing_passes_a_big_request_that_has_waited_too_long() -> None:
    big, small = prefill(0.0, 640, num_growth=9, waited_s=6.0), prefill(1.0, 60)
    made = plan(state([big, small], decodes([600, 700]), num_blocks=32), LIMITS, COST)
    assert made.chunks == []
    assert len(made.decodes) == 2


def test_a_locked_queue_does_not_stop_what_has_started() -> None:
    big = prefill(0.0, 640, num_growth=30, waited_s=6.0)
    started = prefill(1.0, 100, num_computed=64, order=0)
    made = plan(state([big, started], decodes([600]), num_blocks=40), LIMITS, COST)
    assert [chunk.index for chunk in made.chunks] == [1]


def test_paused_prefills_hold_no_more_than_their_share() -> None:
    paused = prefill(5.0, 3000, num_computed=SIZE * 20, order=0)
    another = prefill(0.0, 2000)
    made = plan(state([paused, another], decodes([5]), num_blocks=150), LIMITS, COST)
    assert made.chunks[0].index == 1
    fuller = paused._replace(num_held=60, num_computed=60 * SIZE)
    made = plan(state([fuller, another], decodes([5]), num_blocks=150), LIMITS, COST)
    assert 1 not in [chunk.index for chunk in made.chunks]


def test_memory_runs_out_and_the_cheapest_later_decode_is_preempted() -> None:
    full = decodes([129, 129, 65], orders=[0, 1, 2], num_growth=0)
    made = plan(state([], full, num_blocks=6), LIMITS, COST)
    assert made.preempted_decodes
    assert 0 not in made.preempted_decodes
    assert 0 in made.decodes


def test_a_sequence_preempted_often_is_spared_while_another_is_left() -> None:
    full = decodes([65, 65, 65], orders=[0, 1, 2], num_growth=0)
    full.num_preemptions[1] = 2
    made = plan(state([], full, num_blocks=4), LIMITS, COST)
    assert made.preempted_decodes == [2]


def test_prefills_that_hold_all_blocks_among_them_give_way() -> None:
    first = prefill(1.0, 200, num_computed=SIZE * 2, order=0)
    second = prefill(0.5, 200, num_computed=SIZE * 2, order=1)
    made = plan(state([first, second], num_blocks=4), LIMITS, COST)
    assert made.preempted_prefills == [1]


def test_memory_promised_to_a_tenant_that_is_ahead_is_lent_to_others() -> None:
    grown = decodes([100] * 4, num_growth=13)
    waiting = prefill(num_remaining=64 * 4, num_growth=4)
    alone = plan(state([waiting], grown), LIMITS, COST)
    assert alone.chunks == [], "what runs may grow into the rest"
    ahead = prefill(key=9.0, num_remaining=64 * 4, num_growth=4, surplus_s=1.0)
    contended = plan(state([ahead, waiting], grown), LIMITS, COST)
    assert [chunk.index for chunk in contended.chunks] == [1]


def test_the_last_free_blocks_are_lent_to_tenants_that_run_little() -> None:
    grown = decodes([64 * 7] * 8, num_growth=13)  # 56 of 64 blocks are held: one in eight is free
    ahead = prefill(key=9.0, num_remaining=64 * 2, surplus_s=1.0)
    newcomer = prefill(num_remaining=64 * 2)
    made = plan(state([ahead, newcomer], grown), LIMITS, COST)
    assert [chunk.index for chunk in made.chunks] == [1]
    bigger_tenant = newcomer._replace(is_kept_for=False)
    assert plan(state([ahead, bigger_tenant], grown), LIMITS, COST).chunks == []


def test_a_tenant_that_is_ahead_takes_no_memory_that_another_waits_for() -> None:
    big = prefill(key=1.0, num_remaining=64 * 14)
    small = prefill(key=2.0, num_remaining=64)
    held = decodes([64 * 6], num_growth=0)
    assert [
        c.index for c in plan(state([big, small], held, num_blocks=16), LIMITS, COST).chunks
    ] == [1]
    ahead = small._replace(surplus_s=1.0)
    assert plan(state([big, ahead], held, num_blocks=16), LIMITS, COST).chunks == []
