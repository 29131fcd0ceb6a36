"""Drafts where they pay, and nowhere else."""

import msgspec
import numpy as np
import pytest

from engine.messages import CostModel
from engine.sequence import Sequence
from engine.speculation.speculator import LONGEST_DRAFT, Speculator, StepWithoutDrafts
from tests.engine.driver import request

READING = CostModel(
    base_s=1e-3,
    weights_s=9e-3,
    overlap=0.5,
    per_token_s=1e-4,
    per_prefill_context_s=0.0,
    per_decode_context_s=0.0,
)
"""Waits for its weights: half of the work of 90 tokens hides under reading them."""
COMPUTING = CostModel(
    base_s=1e-3, per_token_s=1e-2, per_prefill_context_s=0.0, per_decode_context_s=0.0
)
RHYTHM = [5, 6, 7, 8] * 4


def sequences(count: int, prompt: list[int] = RHYTHM, **options: int) -> list[Sequence]:
    asked = {"num_tokens": 200} | options
    return [
        Sequence.all_of(request(f"r{index}", prompt, **asked), 0)[0]  # type: ignore[arg-type]
        for index in range(count)
    ]


def step(num_decodes: int, *, num_waiting: int = 0, most: int = 2048) -> StepWithoutDrafts:
    contexts = np.full(num_decodes, 16, dtype=np.int32)
    return StepWithoutDrafts([], contexts, num_waiting=num_waiting, num_tokens_max=most)


def speculator(cost_model: CostModel | None = READING) -> Speculator:
    made = Speculator(context_length=1000)
    made.cost_model = cost_model
    return made


def drafted(made: Speculator, run: list[Sequence], **options: int) -> list[int]:
    planned = step(len(run), **options)
    return [len(some) for some in made.drafts(run, planned)] if made.pays(planned) else []


def test_the_better_its_guesses_the_more_a_sequence_drafts() -> None:
    made, [run] = speculator(), sequences(1)
    lengths = []
    for _ in range(6):
        lengths += drafted(made, [run])
        made.note(run, lengths[-1], lengths[-1])
    assert 0 < lengths[0] < lengths[-1] == LONGEST_DRAFT


def test_one_that_guesses_wrong_stops_and_tries_again_later() -> None:
    made, [run] = speculator(), sequences(1)
    found = []
    for _ in range(1000):
        found += drafted(made, [run], num_waiting=20)
        if found[-1]:
            made.note(run, found[-1], 0)
    trials = [index for index, length in enumerate(found) if length]
    assert trials[0] == 0
    assert 3 < len(trials) < 60
    assert max(np.diff(trials)) > 10
    assert trials[-1] > 900


def test_no_draft_where_arithmetic_is_the_limit_or_nothing_is_known_of_the_machine() -> None:
    assert not any(drafted(speculator(COMPUTING), sequences(1)))
    assert drafted(speculator(None), sequences(1)) == []


@pytest.mark.parametrize(("num_decodes", "is_worth_it"), [(1, True), (8, True), (256, False)])
def test_load_ends_it(num_decodes: int, is_worth_it: bool) -> None:
    run = sequences(num_decodes)
    assert any(drafted(speculator(), run)) == is_worth_it


def test_requests_that_wait_for_their_first_token_count_as_streams_do() -> None:
    assert drafted(speculator(), sequences(1), num_waiting=0) != [0]
    assert not any(drafted(speculator(), sequences(1), num_waiting=1000))


def test_no_step_becomes_twice_as_long_however_likely_its_drafts_are() -> None:
    cost = msgspec.structs.replace(READING, weights_s=2e-3, overlap=0.0, per_token_s=4e-4)
    made, run = speculator(cost), sequences(2)
    for each in run:
        each.drafts.note(4000, 4000)
    planned = step(2)
    num_drafts = sum(len(some) for some in made.drafts(run, planned))
    work = planned.work
    longer = [
        cost.step_s(msgspec.structs.replace(work, num_tokens=work.num_tokens + more))
        for more in (num_drafts, num_drafts + 1)
    ]
    assert longer[0] <= 2 * cost.step_s(work) < longer[1]


def test_a_step_never_has_more_tokens_than_it_may() -> None:
    run = sequences(3)
    for each in run:
        each.drafts.note(40, 40)
    assert sum(drafted(speculator(), run, most=7)) == 4


@pytest.mark.parametrize(
    ("options", "room"),
    [({"authorized": 3}, 2), ({"num_tokens": 4}, 3), ({"authorized": 1}, 0)],
)
def test_no_draft_passes_the_fence_or_the_limit(options: dict[str, int], room: int) -> None:
    [run] = sequences(1, **options)
    run.drafts.note(40, 40)
    assert drafted(speculator(), [run]) == [room]


def test_the_context_is_never_passed() -> None:
    made, [run] = Speculator(context_length=len(RHYTHM) + 5), sequences(1)
    made.cost_model = READING
    run.drafts.note(40, 40)
    assert drafted(made, [run]) == [4]


def test_steps_that_take_longer_with_drafts_than_predicted_end_it_for_a_while() -> None:
    made, [run] = speculator(), sequences(1)
    work = step(1).work
    for _ in range(100):
        made.observe(work, 0.01, has_drafts=False)
        made.observe(work, 0.03, has_drafts=True)
    assert made.overhead == pytest.approx(3, rel=0.1)
    assert not any(drafted(made, [run]))
    for _ in range(2000):
        made.observe(work, 0.01, has_drafts=False)
    assert any(drafted(made, [run])), "what was measured long ago is forgotten"


def test_a_slow_first_step_says_nothing_of_drafts() -> None:
    made, [run] = speculator(), sequences(1)
    made.observe(step(1).work, 0.5, has_drafts=False)
    for _ in range(50):
        made.observe(step(1).work, 0.01, has_drafts=False)
    assert made.overhead == 1
    assert any(drafted(made, [run]))
