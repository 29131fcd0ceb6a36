"""From tokens to text and from text to JSON, without a server."""

from pathlib import Path

import pytest

from api.choices import Choice, ShownToken
from api.errors import field_path
from api.formats.logprobs import legacy_logprobs, token_string
from api.outputs.deltas import text_of
from api.routes.models import per_token
from api.summary import Timings
from engine.messages import TokenFrame, TokenLogprob
from engine.tokenization import Tokenizer
from tests.api.conftest import fast_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(default_model_directory: Path) -> Tokenizer:
    return Tokenizer.load(default_model_directory)


def frame(*token_ids: int, first_index: int = 0, **rest: object) -> TokenFrame:
    logprobs = tuple(TokenLogprob(-1.0) for _ in token_ids)
    return TokenFrame("r", 1, first_index, token_ids, logprobs=logprobs, **rest)


def ids(directory: Path, text: str) -> list[int]:
    found: list[int] = fast_tokenizer(directory).encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", ["gamma", "a g", " ", "delta", "zzz"])
def test_a_stop_cuts_at_the_same_place_however_frames_are_cut(
    tokenizer: Tokenizer, default_model_directory: Path, size: int, stop: str
) -> None:
    text = "alpha beta gamma delta"
    token_ids = ids(default_model_directory, text)
    choice = Choice(0, tokenizer, (stop,))
    shown, tokens = "", 0
    for start in range(0, len(token_ids), size):
        is_last = start + size >= len(token_ids)
        piece = choice.accept(
            frame(
                *token_ids[start : start + size],
                first_index=start,
                finish_reason="length" if is_last else None,
            )
        )
        if piece is not None:
            shown += text_of(piece.deltas)
            tokens += len(piece.tokens)
    assert shown == text.partition(stop)[0]
    assert choice.finish_reason == ("stop" if stop in text else "length")
    shown_tokens = "".join(tokenizer.token_text(t).decode() for t in token_ids[:tokens])
    assert shown_tokens.startswith(shown), "log-probabilities cover the text and not the stop"
    assert choice.num_tokens >= tokens


def test_half_a_character_at_the_limit_is_flushed_without_a_crash(
    tokenizer: Tokenizer, default_model_directory: Path
) -> None:
    first, *_ = ids(default_model_directory, "🚀")
    choice = Choice(0, tokenizer, ())
    piece = choice.accept(frame(first, finish_reason="length"))
    assert piece is not None
    assert piece.finish_reason == "length"
    assert choice.num_tokens == 1


def test_the_end_of_sequence_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ())
    piece = choice.accept(frame(EOS, finish_reason="stop", stop_token_id=EOS))
    assert piece is not None
    assert (piece.deltas, piece.tokens, piece.finish_reason) == ((), (), "stop")
    assert choice.num_tokens == 1
    assert choice.accept(frame(5, first_index=1)) is None, "nothing follows the end"


@pytest.mark.parametrize(
    ("price", "dollars"),
    [
        (0, "0"),
        (1, "0.000000000000001"),
        (20_000_000, "0.00000002"),
        (10**15, "1"),
        (1_500_000_000, "0.0000015"),
    ],
)
def test_prices_per_token_are_exact_decimals(price: int, dollars: str) -> None:
    assert per_token(price) == dollars


def test_field_paths_are_written_as_openai_does() -> None:
    assert (
        field_path(("messages", 0, "content", "<parts>", 2, "text"))
        == "messages[0].content[2].text"
    )
    assert field_path(()) is None


def test_half_a_character_is_spelled_in_bytes() -> None:
    assert token_string("é".encode()) == "é"
    assert token_string(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert legacy_logprobs((), 5).text_offset == []
    halves = [ShownToken(token, -1.0, (), 0) for token in (b"a\xf0\x9f", b"\x9a\x80", b"b")]
    assert legacy_logprobs(halves, 5).text_offset == [5, 6, 7]


def test_a_decode_rate_needs_more_than_the_first_token() -> None:
    timings = Timings(ttft_us=1_000, decode_us=2_000_000)
    assert timings.as_json(1)["decode_tokens_per_s"] is None
    assert timings.as_json(5)["decode_tokens_per_s"] == 2.0
    assert timings.as_json(10, num_choices=2)["decode_tokens_per_s"] == 2.0
    assert Timings().as_json(5)["ttft_ms"] is None
