"""Planning a step while the one before still runs: the same answers, and never a token too many."""

from collections.abc import Callable

import pytest

from engine.engine import Engine
from engine.messages import Sampling
from engine.settings import EngineSettings
from tests.engine.driver import Driver, create_driver, request
from tests.engine.fake_model import FakeModel, expected_output
from tests.engine.late_runner import LateRunner

PROMPT = list(range(5, 75))


def late_driver(
    model: FakeModel | None = None,
    num_blocks: int = 64,
    *,
    now_us: Callable[[], int] | None = None,
    **settings: object,
) -> Driver:
    engine_settings = EngineSettings(**settings)  # type: ignore[arg-type]
    runner = LateRunner(model or FakeModel(), num_blocks, engine_settings.max_running)
    clock = {} if now_us is None else {"now_us": now_us}
    return Driver(Engine(runner, engine_settings, num_blocks, **clock))


def test_the_answers_are_those_of_a_runner_that_waits() -> None:
    requests = [request(f"r{i}", [i + 1] * (40 * i + 3), 30 + i, num_choices=1) for i in range(9)]
    late, waiting = late_driver(num_blocks=30), create_driver(FakeModel(), 30)
    assert late.generate(requests) == waiting.generate(requests)
    assert late.engine.stats.num_preemptions > 0 or late.engine.stats.output_tokens_total > 0
    assert late.charges.keys() == waiting.charges.keys()


def test_a_step_is_started_before_the_result_of_the_last_one_is_told() -> None:
    run = late_driver()
    run.add(request("a", PROMPT, 10))
    runner = run.engine._runner
    assert isinstance(runner, LateRunner)
    for num_steps in range(1, 8):
        run.step()
        assert runner.num_started == num_steps
        told = run.received["a", 0].token_ids if run.received else []
        assert len(told) == num_steps - 1


@pytest.mark.parametrize("stop_at", [1, 2, 7, 58, 59])
def test_a_stop_is_heard_one_step_late_and_nothing_after_it_is_told_or_counted(
    stop_at: int,
) -> None:
    output = expected_output(PROMPT, 100)
    stop = output[stop_at - 1]
    expected = output[: output.index(stop) + 1]
    run = late_driver()
    run.add(request("a", PROMPT, 100, sampling=Sampling(temperature=0, stop_token_ids=(stop,))))
    run.run()
    assert run.received["a", 0].token_ids == expected
    assert run.received["a", 0].finish_reason == "stop"
    assert run.engine.stats.output_tokens_total == len(expected)


def test_no_token_beyond_the_fence_or_the_limit_is_even_computed() -> None:
    model = FakeModel()
    run = late_driver(model)
    run.add(request("a", PROMPT, 20, authorized=12))
    run.run()
    assert len(run.received["a", 0].token_ids) == 12
    assert model.num_computed_tokens == len(PROMPT) + 11, "the 12th token is computed from the 11th"
    run.engine.extend("a", 20)
    run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 20)
    assert run.received["a", 0].finish_reason == "length"


def test_a_fence_that_moves_in_time_is_never_stood_at() -> None:
    run = late_driver()
    run.add(request("a", PROMPT, 40, authorized=10))
    for _ in range(5):
        run.step()
    run.engine.extend("a", 40)
    run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 40)
    assert run.engine.stats.num_steps == 40, "no step waited for another"


def test_a_slot_that_changes_hands_gives_the_next_one_nothing_of_the_last() -> None:
    """One slot: the second request takes it while the first one's step is still on its way."""
    output = expected_output(PROMPT, 100)
    run = late_driver(max_running=1, kept_slots_share=0)
    stop = Sampling(temperature=0, stop_token_ids=(output[4],))
    run.add(request("a", PROMPT, 100, sampling=stop))
    run.add(request("b", [9] * 30, 12))
    run.run()
    assert run.received["a", 0].token_ids == output[: output.index(output[4]) + 1]
    assert run.received["b", 0].token_ids == expected_output([9] * 30, 12)


def test_a_failure_that_is_heard_late_ends_both_steps_and_the_engine_goes_on() -> None:
    model = FakeModel()
    model.fails_on_token = 511
    run = late_driver(model)
    run.add(request("a", [511, 1], 5))
    for _ in range(5):
        try:
            run.step()
        except RuntimeError:
            output = run.engine.abandon("planted")
            assert [ended.request_id for ended in output.finished] == ["a"]
            break
    assert not run.engine.has_work
    assert run.engine.problems() == []
    assert run.generate([request("b", PROMPT, 9)]) == [expected_output(PROMPT, 9)]


def test_choices_that_forked_in_a_failed_step_end_with_it() -> None:
    """Found by the machine of `test_engine_machine`: nobody else knows of the tokens they wait for."""
    model = FakeModel()
    model.fails_on_token = 511
    run = late_driver(model)
    run.add(request("forks", [9] * 30, 5, num_choices=3))
    run.add(request("poisoned", [511, 1], 5))
    for _ in range(5):
        try:
            run.step()
        except RuntimeError:
            output = run.engine.abandon("planted")
            frames = [frame for node in output.frames.values() for frame in node]
            ended = {(frame.request_id, frame.choice) for frame in frames if frame.error}
            assert ended == {("forks", 0), ("forks", 1), ("forks", 2), ("poisoned", 0)}
            break
    assert not run.engine.has_work
    assert run.engine.problems() == []


def test_penalties_wait_for_the_tokens_that_they_depend_on() -> None:
    sampling = Sampling(temperature=0, repetition_penalty=1.3, min_tokens=20, stop_token_ids=(3,))
    requests = [
        request("a", PROMPT, 30, sampling=sampling),
        request("b", [9] * 30, 30),
    ]
    late, waiting = late_driver(), create_driver(FakeModel(), 64)
    assert late.generate(requests) == waiting.generate(requests)


def test_seconds_are_counted_once_however_much_steps_overlap() -> None:
    now = [0]

    def clock() -> int:
        now[0] += 1_000
        return now[0]

    run = late_driver(now_us=clock)
    run.generate([request("a", PROMPT, 30, tenant="one"), request("b", PROMPT, 30, tenant="two")])
    assert sum(run.charges.values()) <= now[0] / 1e6
    assert sum(run.charges.values()) > 0.5 * now[0] / 1e6
