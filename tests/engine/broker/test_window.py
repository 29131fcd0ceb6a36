"""How many requests a worker takes beyond those that run."""

from engine.broker.window import TakeRoom, take_room


def whole_room(num_waiting: int, num_held: int) -> TakeRoom:
    return take_room(num_waiting=num_waiting, num_held=num_held, max_running=8, take_window=4)


def room(num_waiting: int, num_held: int) -> int:
    return whole_room(num_waiting, num_held).for_any


def test_an_idle_worker_takes_a_window() -> None:
    assert room(num_waiting=0, num_held=0) == 4


def test_what_waits_already_counts() -> None:
    assert room(num_waiting=3, num_held=9) == 1
    assert room(num_waiting=4, num_held=9) == 0
    assert room(num_waiting=9, num_held=9) == 0


def test_requests_taken_since_the_last_step_count_as_waiting_when_no_slot_is_left_for_them() -> (
    None
):
    assert room(num_waiting=0, num_held=11) == 1


def test_a_worker_never_holds_more_than_it_may_run_and_a_window() -> None:
    assert room(num_waiting=0, num_held=12) == 0


def test_a_full_window_leaves_a_place_for_tenants_that_have_none_in_it() -> None:
    assert whole_room(num_waiting=4, num_held=9) == TakeRoom(for_any=0, for_others=1)
    assert whole_room(num_waiting=1, num_held=9) == TakeRoom(for_any=3, for_others=1)
    assert not whole_room(num_waiting=5, num_held=9).is_any
    assert not whole_room(num_waiting=0, num_held=13).is_any
