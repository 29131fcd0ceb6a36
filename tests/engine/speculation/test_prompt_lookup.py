"""The match finder beside a search through the whole text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.speculation.prompt_lookup import LONGEST_MATCH, MAX_CANDIDATES, PromptLookup


def ids(tokens: list[int], capacity: int = 0) -> NDArray[np.int32]:
    buffer = np.full(max(capacity, len(tokens)), 99, dtype=np.int32)
    buffer[: len(tokens)] = tokens
    return buffer


def by_search(tokens: list[int], most: int) -> list[int]:
    """What follows the longest of the last places where the last two tokens stood."""
    last = len(tokens) - 1
    places = [
        place for place in range(last - 1, 0, -1) if tokens[place - 1 : place + 1] == tokens[-2:]
    ]
    best, best_length = None, 0
    for place in places[:MAX_CANDIDATES]:
        length = 2
        while length < min(LONGEST_MATCH, place + 1) and (
            tokens[place - length] == tokens[last - length]
        ):
            length += 1
        if length > best_length:
            best, best_length = place, length
    if best is None:
        return []
    found: list[int] = []
    while len(found) < most:
        found += tokens[best + 1 :]
    return found[:most]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.data())
def test_it_finds_what_a_search_through_the_text_finds(
    tokens: list[int], data: st.DataObject
) -> None:
    """A few tokens at a time, or many at once; its buffer grows as a sequence's does."""
    lookup = PromptLookup()
    num_tokens = 0
    while num_tokens < len(tokens):
        num_tokens = min(len(tokens), num_tokens + data.draw(st.sampled_from([1, 3, 40])))
        capacity = -(-num_tokens // 48) * 48
        found = lookup.propose(ids(tokens[:num_tokens], capacity), num_tokens, 5)
        seen = tokens[:num_tokens]
        assert found.tolist() == (by_search(seen, 5) if num_tokens > 2 else [])


def test_a_rhythm_goes_on() -> None:
    assert PromptLookup().propose(ids([1, 2, 3, 1, 2, 3, 1, 2]), 8, 7).tolist() == [
        3,
        1,
        2,
        3,
        1,
        2,
        3,
    ]


def test_the_longest_match_wins_over_the_latest() -> None:
    text = [1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    assert PromptLookup().propose(ids(text), len(text), 1).tolist() == [50]


@pytest.mark.parametrize("text", [[], [5], [5, 5], [1, 2, 3, 4, 5]])
def test_what_never_stood_before_is_not_guessed(text: list[int]) -> None:
    assert PromptLookup().propose(ids(text, 64), len(text), 4).tolist() == []


def test_tokens_of_a_large_vocabulary_do_not_overflow() -> None:
    text = [2**31 - 1, 2**31 - 2, 7] * 20
    lookup = PromptLookup()
    assert lookup.propose(ids(text), len(text), 3).tolist() == text[:3]
