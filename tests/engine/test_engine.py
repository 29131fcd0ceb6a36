"""The step loop over a model whose output depends on every page that it reads."""

import random

import numpy as np
import pytest

from engine.messages import Sampling
from engine.scheduling.planner import Plan, plan
from engine.scheduling.slots import SEED_OF_CHOICE, signed_64
from tests.engine.driver import Driver, create_driver, request
from tests.engine.fake_model import FakeModel, expected_output


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(512) for _ in range(length)]


def driver(num_blocks: int = 64, **settings: object) -> Driver:
    return create_driver(FakeModel(), num_blocks, **settings)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 300])
def test_one_request_gets_what_the_model_says(length: int) -> None:
    assert driver().generate([request("a", prompt(length), 70)]) == [
        expected_output(prompt(length), 70)
    ]


def test_a_batch_of_mixed_lengths_equals_one_at_a_time() -> None:
    prompts = [prompt(length, seed=length) for length in (1, 5, 64, 65, 130, 200, 31, 63)]
    outputs = driver().generate([request(f"r{i}", p, 20 + i) for i, p in enumerate(prompts)])
    assert outputs == [expected_output(p, 20 + i) for i, p in enumerate(prompts)]


def test_chunked_prefill_changes_nothing() -> None:
    chunked = driver(max_step_tokens=64)
    assert chunked.generate([request("a", prompt(500), 10)]) == [expected_output(prompt(500), 10)]


def test_a_stop_id_ends_the_choice_and_is_told_apart() -> None:
    stop = expected_output(prompt(10), 5)[4]
    run = driver()
    run.generate(
        [request("a", prompt(10), 50, sampling=Sampling(temperature=0, stop_token_ids=(stop,)))]
    )
    received = run.received["a", 0]
    assert received.token_ids == expected_output(prompt(10), 50, (stop,))
    assert (received.finish_reason, received.stop_token_id) == ("stop", stop)


def test_the_fence_is_never_passed() -> None:
    run = driver()
    run.generate([request("a", prompt(10), 7)])
    assert len(run.received["a", 0].token_ids) == 7
    assert run.received["a", 0].finish_reason == "length"


def test_a_shared_prefix_is_computed_once_and_counted_exactly() -> None:
    model = FakeModel()
    run = create_driver(model, 64)
    shared = prompt(128)
    run.generate([request("first", shared + prompt(10, 1), 4)])
    before = model.num_computed_tokens
    (output,) = run.generate([request("second", shared + prompt(10, 2), 4)])
    assert output == expected_output(shared + prompt(10, 2), 4)
    assert run.received["second", 0].num_cached_tokens == 128
    assert model.num_computed_tokens - before == 10 + 3


def test_another_tenant_finds_nothing_in_the_cache() -> None:
    run = driver()
    run.generate([request("first", prompt(200), 2, tenant="one")])
    run.generate([request("second", prompt(200), 2, tenant="two")])
    assert run.received["second", 0].num_cached_tokens == 0


@pytest.mark.usefixtures("eager_admission")
def test_preempted_sequences_resume_with_the_same_output() -> None:
    run = driver(num_blocks=8)
    prompts = [prompt(60, seed) for seed in range(6)]
    outputs = run.generate([request(f"r{i}", p, 150) for i, p in enumerate(prompts)])
    assert outputs == [expected_output(p, 150) for p in prompts]
    assert 0 < run.engine.stats.num_preemptions < 40, "it preempts, and does not thrash"


def test_reservation_makes_preemption_rare() -> None:
    run = driver(num_blocks=8)
    prompts = [prompt(60, seed) for seed in range(6)]
    run.generate([request(f"r{i}", p, 150) for i, p in enumerate(prompts)])
    assert run.engine.stats.num_preemptions == 0


@pytest.mark.usefixtures("eager_admission")
def test_choices_that_do_not_fit_together_are_computed_one_after_the_other() -> None:
    run = driver(num_blocks=6)
    run.generate([request("a", prompt(100), 200, num_choices=3)])
    for choice in range(3):
        assert run.received["a", choice].token_ids == expected_output(prompt(100), 200)
    assert run.engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("sampling", "forbidden"),
    [
        (Sampling(temperature=0, logit_bias={300: -100.0}), 300),
        (Sampling(temperature=0, repetition_penalty=5.0), None),
        (Sampling(temperature=0, frequency_penalty=2.0, presence_penalty=1.0), None),
    ],
)
def test_adjusted_and_plain_requests_share_a_batch(sampling: Sampling, forbidden: object) -> None:
    run = driver()
    outputs = run.generate(
        [request("adjusted", [300, 5], 20, sampling=sampling), request("plain", [7, 8, 9], 20)]
    )
    assert outputs[1] == expected_output([7, 8, 9], 20)
    assert forbidden not in outputs[0]


def test_a_bias_moves_the_choice_and_a_minimum_length_forbids_the_stop() -> None:
    first = expected_output([1, 2], 1)[0]
    biased = Sampling(temperature=0, logit_bias={9: 100.0})
    stopped = Sampling(temperature=0, stop_token_ids=(first,))
    late = Sampling(temperature=0, stop_token_ids=(first,), min_tokens=3)
    run = driver()
    outputs = run.generate(
        [
            request("biased", [1, 2], 4, sampling=biased),
            request("stopped", [1, 2], 4, sampling=stopped),
            request("late", [1, 2], 4, sampling=late),
        ]
    )
    assert outputs[0] == [9, 9, 9, 9]
    assert outputs[1] == [first]
    assert len(outputs[2]) >= 3
    assert first not in outputs[2][:2]


def test_penalties_count_each_occurrence() -> None:
    sampling = Sampling(temperature=0, logit_bias={9: 12.0}, frequency_penalty=1.5)
    (output,) = driver().generate([request("a", [1, 2], 6, sampling=sampling)])
    assert output[:2] == [9, 9], "12.0 and then 10.5 beat the model's 10.0"
    assert output[2] != 9, "9.0 does not"


def test_a_request_that_comes_back_replaces_its_earlier_attempt() -> None:
    whole = expected_output(prompt(50), 40)
    run = driver()
    run.add(request("a", prompt(50), 40))
    for _ in range(6):
        run.step()
    del run.received["a", 0]
    run.add(request("a", prompt(50), 40, attempt=2, emitted=tuple(whole[:5])))
    run.run()
    assert whole[:5] + run.received["a", 0].token_ids == whole
    assert {frame.attempt for frame in run.received["a", 0].frames} == {2}


def test_choices_share_the_prompt_and_differ_in_nothing_else() -> None:
    run = driver()
    run.generate([request("a", prompt(100), 90, num_choices=3)])
    for choice in range(3):
        assert run.received["a", choice].token_ids == expected_output(prompt(100), 90)
    assert run.finished == ["a"]


def test_a_cancelled_request_frees_its_blocks_at_once() -> None:
    run = driver()
    run.add(request("a", prompt(100), 1000))
    for _ in range(5):
        run.step()
    run.engine.cancel("a")
    run.step()
    assert run.received["a", 0].finish_reason == "abort"
    assert run.engine.stats.num_running == 0
    assert run.engine.problems() == []


def test_requests_of_a_dead_node_end_and_the_others_go_on() -> None:
    run = driver()
    run.add(request("dead", prompt(10), 1000, node="gone"))
    run.add(request("alive", prompt(11), 20, node="here"))
    run.step()
    run.engine.cancel_nodes({"gone"})
    run.run()
    assert run.received["alive", 0].token_ids == expected_output(prompt(11), 20)


def test_a_resubmitted_request_goes_on_where_it_stopped() -> None:
    whole = expected_output(prompt(50), 40)
    run = driver()
    (rest,) = run.generate([request("a", prompt(50), 40, attempt=2, emitted=tuple(whole[:15]))])
    assert whole[:15] + rest == whole


def test_each_open_choice_of_a_resubmitted_request_goes_on_from_its_own_tokens() -> None:
    whole = expected_output(prompt(50), 40)
    emitted = (tuple(whole[:15]), tuple(whole), tuple(whole[:3]), ())
    run = driver()
    run.generate(
        [request("a", prompt(50), 40, num_choices=4, attempt=2, emitted=emitted, ended=(1,))]
    )
    rest = {choice: run.received["a", choice].token_ids for choice in (0, 2, 3)}
    assert rest == {0: whole[15:], 2: whole[3:], 3: whole}
    assert ("a", 1) not in run.received
    assert run.finished == ["a"]


def test_a_resubmitted_request_with_every_choice_complete_is_finished_at_once() -> None:
    run = driver()
    run.add(request("a", prompt(50), 2, attempt=2, emitted=(7, 8), ended=(0,)))
    run.run()
    assert (run.finished, run.received) == (["a"], {})


def test_a_drain_withdraws_no_request_of_which_a_choice_has_started() -> None:
    run = driver(max_step_tokens=64)
    emitted = ((1,), (2,), (3,))
    run.add(request("a", prompt(50), 40, num_choices=3, attempt=2, emitted=emitted))
    run.add(request("b", prompt(60), 40, key=9.0))
    run.step()
    assert run.engine.withdraw_waiting() == ["b"]
    run.run()
    assert run.finished == ["a"]


def test_sixty_four_sequences_at_once_complete() -> None:
    run = driver(num_blocks=256)
    prompts = [prompt(20 + seed, seed) for seed in range(64)]
    outputs = run.generate([request(f"r{i}", p, 30) for i, p in enumerate(prompts)])
    assert outputs == [expected_output(p, 30) for p in prompts]


def test_a_failed_step_ends_its_own_requests_and_the_engine_lives() -> None:
    model = FakeModel()
    run = create_driver(model, 64)
    model.fails_on_token = 511
    run.add(request("bad", [511, 1, 2], 5))
    with pytest.raises(RuntimeError, match="planted"):
        run.step()
    output = run.engine.abandon("failed")
    (frame,) = [frame for frames in output.frames.values() for frame in frames]
    assert (frame.finish_reason, frame.error) == ("error", "failed")
    model.fails_on_token = None
    assert run.generate([request("good", prompt(9), 5)]) == [expected_output(prompt(9), 5)]


def test_a_row_without_a_finite_logit_fails_alone() -> None:
    model = FakeModel()
    model.nan_on_token = 510
    run = create_driver(model, 64)
    run.add(request("bad", [510, 1], 5))
    run.add(request("good", [5, 6, 7], 5))
    run.run()
    assert run.received["bad", 0].finish_reason == "error"
    assert run.received["good", 0].token_ids == expected_output([5, 6, 7], 5)


@pytest.mark.parametrize(
    "bad",
    [
        request("empty", []),
        request("vocabulary", [512]),
        request("negative", [-1]),
        request("context", [1] * 4096),
        request("memory", [1] * 4000, 90),
    ],
    ids=lambda bad: bad.request_id,
)
def test_what_can_never_run_is_answered_with_an_error(bad: object) -> None:
    run = driver(num_blocks=16)
    run.add(bad)  # type: ignore[arg-type]
    run.run()
    (received,) = run.received.values()
    assert received.finish_reason == "error"
    assert received.error


def test_machine_seconds_are_charged_to_those_who_used_them() -> None:
    run = driver()
    run.generate(
        [request("a", prompt(200), 5, tenant="big"), request("b", prompt(3), 5, tenant="small")]
    )
    assert run.charges["big"] > run.charges["small"] > 0


def test_decodes_ride_along_while_a_prompt_is_prefilled() -> None:
    run = driver(max_step_tokens=64)
    run.add(request("decoding", prompt(10), 40))
    run.step()
    run.add(request("prefilling", prompt(400, 1), 2))
    before = len(run.received["decoding", 0].token_ids)
    for _ in range(4):
        run.step()
    assert ("prefilling", 0) not in run.received
    assert len(run.received["decoding", 0].token_ids) == before + 4


def test_the_shorter_prompt_goes_first_and_the_longer_one_does_not_starve() -> None:
    run = driver(max_step_tokens=64)
    run.add(request("long", prompt(300), 1, key=3.0))
    run.add(request("short", prompt(30, 1), 1, key=0.3))
    run.run()
    assert run.finished == ["short", "long"]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch() -> None:
    sampling = Sampling(temperature=1.5, seed=42)
    alone = driver().generate([request("a", prompt(12), 20, sampling=sampling)])
    crowd = [request(f"r{i}", prompt(20, i), 20) for i in range(5)]
    together = driver().generate([request("a", prompt(12), 20, sampling=sampling), *crowd])
    assert together[0] == alone[0]


def test_sampled_choices_diverge_and_each_is_the_one_that_its_seed_gives_alone() -> None:
    sampling = Sampling(temperature=2.0, seed=5)
    run = driver()
    run.generate([request("all", prompt(100), 70, num_choices=3, sampling=sampling)])
    texts = [run.received["all", choice].token_ids for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    for choice, text in enumerate(texts):
        seed = signed_64(5 + choice * SEED_OF_CHOICE)
        own = Sampling(temperature=2.0, seed=seed)
        assert driver().generate([request("one", prompt(100), 70, sampling=own)]) == [text]


def test_a_preempted_prefill_gives_its_blocks_back_and_starts_again() -> None:
    nothing = Plan([], np.zeros(0, dtype=np.intp), preempted_prefills=[0], preempted_decodes=[])
    plans = iter([None, None, nothing])
    run = driver(
        max_step_tokens=64,
        is_prefix_cache_on=False,
        policy=lambda *state: next(plans, None) or plan(*state),
    )
    run.add(request("a", prompt(300), 5))
    run.step()
    run.step()
    run.step()
    assert run.engine.stats.num_preemptions == 1
    assert run.engine.stats.free_kv_tokens == 63 * 64, "it has begun again with one block"
    run.run()
    assert run.received["a", 0].token_ids == expected_output(prompt(300), 5)
