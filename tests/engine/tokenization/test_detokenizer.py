"""However the ids arrive, the text is the same, in whole characters."""

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.tokenization import Tokenizer
from engine.tokenization.detokenizer import IncrementalDetokenizer

QUICK = settings(max_examples=100, suppress_health_check=list(HealthCheck))
TEXTS = st.text(alphabet=st.sampled_from(list("the a  é世界🦜\n\u0301!")), max_size=40)


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [
        detokenizer.append(ids[start:end]) for start, end in zip(borders, borders[1:], strict=False)
    ]
    return [*pieces, detokenizer.flush()]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return asyncio.run(tokenizer.encode_text(text, add_special_tokens=False))


@QUICK
@given(ids=st.lists(st.integers(0, 49_151), max_size=40), cuts=st.lists(st.integers(0, 99)))
def test_any_ids_in_any_pieces_give_the_text_of_the_whole(
    default_tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert "".join(streamed(default_tokenizer, ids, cuts)) == default_tokenizer.decode(ids)


@QUICK
@given(text=TEXTS, cuts=st.lists(st.integers(0, 99)))
def test_byte_level_text_comes_back_in_whole_characters(
    default_tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    pieces = streamed(default_tokenizer, encode(default_tokenizer, text), cuts)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@QUICK
@given(text=TEXTS, cuts=st.lists(st.integers(0, 99)))
def test_sentencepiece_text_comes_back_in_whole_characters(
    family: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = encode(family, text)
    pieces = streamed(family, ids, cuts)
    assert "".join(pieces) == family.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


@QUICK
@given(ids=st.lists(st.integers(0, 420), max_size=30), cuts=st.lists(st.integers(0, 99)))
def test_invalid_bytes_in_any_pieces_give_one_text(
    family: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert "".join(streamed(family, ids, cuts)) == "".join(streamed(family, ids, []))


def test_a_cut_character_is_held_back_and_flushed_without_a_crash(family: Tokenizer) -> None:
    parrot = encode(family, "🦜")
    detokenizer = IncrementalDetokenizer(family)
    assert detokenizer.append(parrot[:-1]).strip() == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_only_the_space_before_the_first_word_is_dropped(family: Tokenizer) -> None:
    ids = encode(family, "the the")
    assert "".join(streamed(family, ids, [1])).split(" ")[-2:] == ["the", "the"]
    assert "".join(streamed(family, ids, [1])) == "the the"


def test_control_tokens_have_no_text(default_tokenizer: Tokenizer, family: Tokenizer) -> None:
    for tokenizer in (default_tokenizer, family):
        ids = [1, *encode(tokenizer, "the"), 2]
        assert "".join(streamed(tokenizer, ids, [])) == "the"


def test_ids_without_a_name_have_no_text(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.token_text(10**6) == b""
