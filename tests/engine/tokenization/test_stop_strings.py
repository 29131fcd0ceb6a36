"""Stop strings cut the text where they should, whatever the chunks are, and lose nothing."""

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenization.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], chunks: list[str]) -> tuple[str, bool, str]:
    """What was shown, whether a stop was found, and what was shown before the flush."""
    cutter = StopStrings(stops)
    shown = "".join(cutter.push(chunk) for chunk in chunks)
    return shown + cutter.flush(), cutter.is_matched, shown


def split(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """Read letter by letter until the text ends in a stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(stops=STOPS, text=LETTERS, cuts=st.lists(st.integers(0, 99)))
def test_any_chunks_give_the_text_before_the_first_stop(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    shown, is_matched, _ = run(stops, split(text, cuts))
    assert (shown, is_matched) == reference(stops, text)
    assert not any(stop in shown for stop in stops)


@given(stops=STOPS, text=LETTERS, cuts=st.lists(st.integers(0, 99)))
def test_only_what_may_become_a_stop_is_held_back(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    shown, is_matched, early = run(stops, split(text, cuts))
    held = shown[len(early) :]
    if not is_matched and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_is_held_back_without_stops() -> None:
    assert run([], ["a", "b"]) == ("ab", False, "ab")
    assert run([""], ["a", "b"]) == ("ab", False, "ab")


def test_text_after_a_stop_is_not_shown() -> None:
    assert run(["\n\n"], ["a\n", "\nb", "c"]) == ("a", True, "a")


def test_an_almost_match_is_flushed() -> None:
    assert run(["END"], ["the EN"]) == ("the EN", False, "the ")
