"""The fence: no token is computed that is not paid for, and who stands at it takes nobody's place."""

import pytest

from engine.engine import Engine
from engine.messages import GenerateRequest, Sampling
from tests.engine.driver import Driver, create_driver, request
from tests.engine.fake_model import FakeModel, expected_output

PROMPT = list(range(5, 75))


def driver(num_blocks: int = 64, **settings: object) -> Driver:
    return create_driver(FakeModel(), num_blocks, **settings)


def is_parked_alone(engine: Engine) -> bool:
    stats = engine.stats
    is_free = stats.free_kv_tokens == stats.total_kv_tokens
    return (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 1) and is_free


@pytest.mark.parametrize("fence", [1, 57, 58, 59, 64])
def test_it_stands_at_its_fence_without_slot_and_memory_and_goes_on_as_if_nothing_were(
    fence: int,
) -> None:
    """58 tokens fill the second block."""
    run = driver()
    run.add(request("a", PROMPT, 130, authorized=fence))
    run.run()
    assert len(run.received["a", 0].token_ids) == fence
    assert run.received["a", 0].finish_reason is None
    assert is_parked_alone(run.engine)
    for target in (fence, fence - 1, 90, 90, 500):
        run.engine.extend("a", target)
        run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 130)
    assert run.received["a", 0].finish_reason == "length"
    assert run.finished == ["a"]


def test_what_the_prefix_cache_kept_is_not_computed_again() -> None:
    model = FakeModel()
    run = create_driver(model, 64)
    run.add(request("a", PROMPT, 60, authorized=59))
    run.run()
    before = model.num_computed_tokens
    run.engine.extend("a", 60)
    run.run()
    assert model.num_computed_tokens - before == 1, "of 129 tokens 128 are in whole blocks"


def test_an_evicted_one_is_computed_again_and_says_the_same() -> None:
    run = driver(num_blocks=6)
    run.add(request("a", PROMPT, 100, authorized=40))
    run.run()
    run.generate([request("b", [9] * 300, 60)])
    run.engine.extend("a", 100)
    run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 100)


def test_a_fence_that_moves_in_time_stops_nothing() -> None:
    run = driver()
    run.add(request("a", PROMPT, 40, authorized=10))
    for _ in range(10):
        run.step()
        run.engine.extend("a", 10 + len(run.received["a", 0].token_ids))
    assert run.engine.stats.num_parked == 0
    assert run.engine.stats.num_running == 1


def test_one_slot_serves_others_while_a_request_is_parked() -> None:
    run = driver(max_running=1)
    run.add(request("a", PROMPT, 20, authorized=5))
    assert run.generate([request("b", [7, 8], 12)]) == [expected_output([7, 8], 12)]
    assert is_parked_alone(run.engine)


def test_choices_park_each_for_itself_and_all_go_on() -> None:
    sampling = Sampling(temperature=0)
    run = driver()
    run.add(request("a", PROMPT, 30, authorized=8, num_choices=3, sampling=sampling))
    run.run()
    assert is_parked_alone(run.engine)
    run.engine.extend("a", 30)
    run.run()
    texts = [run.received["a", choice].token_ids for choice in range(3)]
    assert texts == [expected_output(PROMPT, 30)] * 3


def test_a_choice_that_has_said_enough_leaves_the_others_alone() -> None:
    run = driver()
    run.add(request("a", PROMPT, 30, authorized=8, num_choices=3))
    run.engine.end_choice("a", 1)
    run.step()
    assert run.engine.stats.num_running == 3, "before the fork it is no sequence of its own"
    run.engine.end_choice("a", 1)
    run.run()
    assert len(run.received["a", 1].token_ids) == 1
    assert len(run.received["a", 2].token_ids) == 8
    run.engine.end_choice("a", 2)
    run.engine.extend("a", 30)
    run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 30)
    assert len(run.received["a", 2].token_ids) == 8, "it stood at its fence"
    assert run.finished == ["a"]


def test_a_request_ends_with_the_choice_that_has_said_enough_last() -> None:
    run = driver()
    run.add(request("a", PROMPT, 30, num_choices=2))
    run.step()
    for choice in (1, 0, 0):
        run.engine.end_choice("a", choice)
    run.run()
    assert run.finished == ["a"]
    assert run.engine.stats.num_running == 0


def resumed(authorized: int) -> GenerateRequest:
    emitted = tuple(expected_output(PROMPT, 8))
    return request("a", PROMPT, 20, authorized=authorized, attempt=2, emitted=emitted)


def test_a_failover_at_the_fence_waits_on_the_next_worker() -> None:
    run = driver()
    run.add(resumed(authorized=8))
    run.run()
    assert is_parked_alone(run.engine)
    run.engine.extend("a", 20)
    run.run()
    assert run.received["a", 0].token_ids == expected_output(PROMPT, 20)[8:]


def test_parked_ones_can_be_cancelled_die_with_their_node_and_move_on_with_a_drain() -> None:
    run = driver()
    for name in ("cancelled", "orphaned", "moved"):
        run.add(request(name, PROMPT, 20, authorized=5, node=name))
    run.run()
    assert run.engine.stats.num_parked == 3
    run.engine.cancel("cancelled")
    run.engine.cancel_nodes({"orphaned"})
    assert run.engine.withdraw_waiting() == ["moved"]
    run.run()
    assert run.received["cancelled", 0].finish_reason == "abort"
    assert sorted(run.finished) == ["cancelled", "orphaned"]
    assert run.engine.stats.num_parked == 0
