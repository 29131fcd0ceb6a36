"""How many requests a worker takes beyond those that run."""

from engine.broker.window import take_room


def room(num_waiting: int, num_held: int) -> int:
    return take_room(num_waiting=num_waiting, num_held=num_held, max_running=8, take_window=4)


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
