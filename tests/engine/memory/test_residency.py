"""Which models are in memory: decisions of the pure function."""

from typing import Any

from engine.memory.residency import NOTHING, SETTLED_S, Absent, Decision, Resident, decide

LONG = 1000.0


def decision(residents: list[Resident], absents: list[Absent], **changes: Any) -> Decision:
    facts: dict[str, Any] = {"free_bytes": 10, "idle_unload_s": 0.0, "swap_after_s": 30.0}
    return decide(residents, absents, **(facts | changes))


def idle(name: str, num_bytes: int = 10, idle_s: float = LONG) -> Resident:
    return Resident(name, num_bytes, idle_s, LONG)


def busy(name: str, num_bytes: int = 10, loaded_s: float = LONG) -> Resident:
    return Resident(name, num_bytes, None, loaded_s)


def wanted(name: str, num_bytes: int = 10, wanted_s: float = 1.0) -> Absent:
    return Absent(name, num_bytes, wanted_s)


def test_what_is_wanted_and_fits_is_loaded_the_longest_waiting_first() -> None:
    absents = [wanted("a", wanted_s=1.0), wanted("b", wanted_s=5.0)]
    assert decision([busy("x")], absents) == Decision(load="b")


def test_the_least_recently_used_idle_model_leaves_for_one_that_is_wanted() -> None:
    residents = [idle("new", idle_s=5.0), idle("old", idle_s=50.0), busy("x")]
    assert decision(residents, [wanted("a", 15)]) == Decision(unload="old")


def test_no_idle_model_leaves_where_that_would_not_be_enough() -> None:
    assert decision([idle("a"), busy("x", 100)], [wanted("b", 50)]) == NOTHING


def test_a_model_that_has_just_been_loaded_is_not_taken_for_idle() -> None:
    assert decision([idle("a", idle_s=SETTLED_S / 2)], [wanted("b", 15)]) == NOTHING


def test_where_all_are_busy_the_one_served_longest_gives_way_after_a_while() -> None:
    residents = [busy("a", loaded_s=40.0), busy("b", loaded_s=90.0)]
    assert decision(residents, [wanted("c", 15, wanted_s=29.0)]) == NOTHING
    assert decision(residents, [wanted("c", 15, wanted_s=31.0)]) == Decision(unload="b")
    assert decision([busy("a", loaded_s=3.0)], [wanted("c", 15, wanted_s=31.0)]) == NOTHING


def test_a_new_model_is_loaded_unasked_only_where_there_is_room() -> None:
    new = Absent("a", 10, None, is_new=True)
    assert decision([idle("x")], [new]) == Decision(load="a")
    assert decision([idle("x")], [new], free_bytes=9) == NOTHING
    assert decision([idle("x")], [Absent("a", 10, None)]) == NOTHING


def test_what_can_never_fit_is_tried_alone_so_that_it_says_what_is_missing() -> None:
    assert decision([], [wanted("a", 999)]) == Decision(load="a")


def test_idle_models_leave_after_the_set_time_and_stay_without_one() -> None:
    assert decision([idle("a", idle_s=60.0)], [], idle_unload_s=61.0) == NOTHING
    assert decision([idle("a", idle_s=60.0)], [], idle_unload_s=60.0) == Decision(unload="a")
    assert decision([idle("a")], []) == NOTHING
    assert decision([busy("a")], [], idle_unload_s=1.0) == NOTHING
