"""What a tokenizer's directory says is read, in each of the forms that models come in."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.errors import ModelRefused
from engine.tokenization import Tokenizer
from tests.engine.tokenization.conftest import llama_like, save


def test_the_default_models_facts_are_read(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.eos_token_ids == (2,)
    assert default_tokenizer.vocab_size == 49_152
    assert default_tokenizer.context_length == 8_192
    assert {0, 1, 2} <= default_tokenizer.special_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {}, (2, 7)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, (2, 7, 8, 9)),
        ({}, {"text_config": {"eos_token_id": 5}}, (2, 5)),
        ({}, {}, (2,)),
    ],
)
def test_every_end_of_sequence_id_counts_wherever_it_is_named(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], expected: object
) -> None:
    save(tmp_path, llama_like(), generation_config=generation, config=config)
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_a_template_in_its_own_file_goes_before_the_configs(tmp_path: Path) -> None:
    save(tmp_path, llama_like())
    (tmp_path / "chat_template.jinja").write_text("the")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(asyncio.run(tokenizer.encode_chat([]))) == "the"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "the"}]
    save(tmp_path, llama_like(), tokenizer_config={"chat_template": named})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(asyncio.run(tokenizer.encode_chat([]))) == "the"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    fast = llama_like()
    fast.enable_truncation(4)
    fast.enable_padding(length=16)
    save(tmp_path, fast)
    ids = asyncio.run(Tokenizer.load(tmp_path).encode_text("x" * 100, add_special_tokens=False))
    assert len(ids) == 101


def test_special_tokens_are_added_only_when_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, llama_like()))
    plain = asyncio.run(tokenizer.encode_text("the", add_special_tokens=False))
    assert asyncio.run(tokenizer.encode_text("the", add_special_tokens=True)) == [1, *plain]


def test_long_text_does_not_stop_the_event_loop(default_tokenizer: Tokenizer) -> None:
    """1 MB takes about half a second; plain `encode` would hold the GIL for all of it."""
    text = "The quick brown fox jumps over the lazy dog. " * 22_000

    async def longest_pause_s() -> tuple[float, float]:
        longest, last = 0.0, time.perf_counter()
        started = last
        encoding = asyncio.create_task(
            default_tokenizer.encode_text(text, add_special_tokens=False)
        )
        while not encoding.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert len(await encoding) > 200_000
        return longest, time.perf_counter() - started

    pause_s, total_s = asyncio.run(longest_pause_s())
    assert pause_s < max(0.1, total_s / 2)


def test_a_model_that_can_fill_in_tells_its_markers(default_model_directory: Path) -> None:
    fast = tokenizers.Tokenizer.from_file(str(default_model_directory / "tokenizer.json"))
    fast.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    empty: dict[str, Any] = {"config": {}, "generation_config": {}, "tokenizer_config": {}}
    able = Tokenizer(fast, **empty, template_source=None)
    first = fast.token_to_id("<|fim_prefix|>")
    assert able.infill_ids == (first, first + 1, first + 2)
    assert Tokenizer.load(default_model_directory).infill_ids is None
