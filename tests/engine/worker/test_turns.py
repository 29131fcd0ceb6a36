"""Whose step is next among the models of one device."""

from hypothesis import given
from hypothesis import strategies as st

from engine.worker.turns import Contender, Turns, next_turn

QUANTUM_S = 0.15


def test_the_shortest_prompt_goes_first_and_prompts_before_streams() -> None:
    models = [Contender("stream", None, 0.0), Contender("long", 2.0, 0.1), Contender("a", 1.0, 0.1)]
    assert next_turn(models, QUANTUM_S).name == "a"
    assert next_turn(models[:2], QUANTUM_S).name == "long"


def test_a_model_that_had_a_quantum_more_than_another_waits() -> None:
    models = [Contender("stream", None, 0.0), Contender("flood", 0.0, QUANTUM_S + 0.01)]
    assert next_turn(models, QUANTUM_S).name == "stream"


def test_time_away_earns_nothing() -> None:
    turns = Turns(QUANTUM_S)
    for _ in range(100):
        assert turns.next({"a": None}) == "a"
        turns.charge("a", 0.1)
    seen = []
    for _ in range(10):
        seen.append(turns.next({"a": None, "b": None}))
        turns.charge(seen[-1], 0.1)
    assert 4 <= seen.count("a") <= 6


@given(
    st.lists(
        st.tuples(st.sampled_from([0.01, 0.05, 0.3]), st.one_of(st.none(), st.floats(0, 9))),
        min_size=2,
        max_size=5,
    )
)
def test_all_that_work_get_equal_shares_whatever_their_steps_and_prompts(
    kinds: list[tuple[float, float | None]],
) -> None:
    turns = Turns(QUANTUM_S)
    keys = {str(index): key for index, (_, key) in enumerate(kinds)}
    used = dict.fromkeys(keys, 0.0)
    for _ in range(400):
        name = turns.next(keys)
        seconds = kinds[int(name)][0]
        turns.charge(name, seconds)
        used[name] += seconds
    assert max(used.values()) - min(used.values()) <= QUANTUM_S + 0.3 + 1e-6
