"""Every way to choose tokens, asked for over HTTP and done by the real engine.

The model's logits are a known function of the last two tokens, so that each answer can be told by
hand, and soon repeat: the engine speculates meanwhile, and nobody may notice but by its counts.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.messages import CostModel
from tests.api.conftest import MODEL, Platform, fast_tokenizer
from tests.api.engine_worker import VOCAB_SIZE, EngineWorker
from tests.engine.fake_model import FakeModel

EOS = 2
PROMPT = [1000, 2000, 3001]
NUM_TOKENS = 40
CHEAP_DRAFTS = CostModel(
    base_s=0.02, per_token_s=1e-4, per_prefill_context_s=1e-9, per_decode_context_s=1e-9
)


@functools.cache
def logits_after(first: int, second: int) -> torch.Tensor:
    """A few hundred words, and an end that is likely after some of them."""
    generator = torch.Generator().manual_seed(50_021 * first + second)
    row = torch.full((VOCAB_SIZE,), -30.0)
    row[500:800] = torch.randn(300, generator=generator) * 2
    if (first + second) % 5 == 0:
        row[EOS] = 20.0
    return row


class KnownModel(FakeModel):
    """Its logits are `logits_after` the last two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, vocab_size=VOCAB_SIZE)

    def logits(self, context: list[int]) -> torch.Tensor:
        return logits_after(context[-2], context[-1])


Choose = Callable[[torch.Tensor, list[int]], int]


def by_hand(choose: Choose, num_tokens: int = NUM_TOKENS, stop: tuple[int, ...] = ()) -> list[int]:
    """The answer, token by token."""
    text: list[int] = []
    while len(text) < num_tokens and (not text or text[-1] not in stop):
        context = PROMPT + text
        text.append(choose(logits_after(context[-2], context[-1]), text))
    return text


def likeliest(row: torch.Tensor, text: list[int]) -> int:
    return int(row.argmax())


def likeliest_word(row: torch.Tensor, text: list[int]) -> int:
    return int(row[500:800].argmax()) + 500


@pytest.fixture
def engine_worker(platform: Platform, clean_redis: str) -> Iterator[EngineWorker]:
    platform.worker.is_taking = False
    worker = EngineWorker(clean_redis, KnownModel(), 64, CHEAP_DRAFTS, max_running=16)
    yield worker
    worker.stop()


class Answers:
    """What is asked of the platform, always with the same prompt of ids."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    async def ask(self, **parameters: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS} | parameters
        response = await self.platform.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    async def text(self, **parameters: Any) -> str:
        text: str = (await self.ask(**parameters))["choices"][0]["text"]
        return text

    def said(self, token_ids: list[int]) -> str:
        tokens = [each for each in token_ids if each != EOS]
        return fast_tokenizer(self.platform.directory).decode(tokens)


@pytest.fixture
def answers(platform: Platform, engine_worker: EngineWorker) -> Answers:
    return Answers(platform)


async def test_ignore_eos_goes_on_to_the_limit_and_without_it_the_end_is_the_end(
    answers: Answers,
) -> None:
    ended = await answers.ask(temperature=0)
    expected = by_hand(likeliest, stop=(EOS,))
    assert len(expected) < NUM_TOKENS, "nothing is tested"
    assert ended["choices"][0]["text"] == answers.said(expected)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == len(expected)
    whole = await answers.ask(temperature=0, ignore_eos=True)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == NUM_TOKENS


async def test_stop_token_ids_end_it_where_they_come_and_are_not_part_of_the_text(
    answers: Answers,
) -> None:
    forever = by_hand(likeliest_word)
    for stop in (forever[0], forever[7]):
        found = await answers.ask(temperature=0, stop_token_ids=[stop], logit_bias={str(EOS): -100})
        count = forever.index(stop) + 1
        assert found["choices"][0]["text"] == answers.said(forever[: count - 1])
        assert found["choices"][0]["finish_reason"] == "stop"
        assert found["usage"]["completion_tokens"] == count


async def test_min_tokens_lets_nothing_end_before(answers: Answers) -> None:
    least = len(by_hand(likeliest, stop=(EOS,))) + 3

    def not_yet(row: torch.Tensor, text: list[int]) -> int:
        return (likeliest_word if len(text) < least else likeliest)(row, text)

    found = await answers.ask(temperature=0, min_tokens=least)
    expected = by_hand(not_yet, stop=(EOS,))
    assert found["choices"][0]["text"] == answers.said(expected)
    assert found["usage"]["completion_tokens"] == len(expected) > least


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {"temperature": 1.7, "top_k": 1},
        {"temperature": 1.7, "top_p": 0},
        {"temperature": 1.7, "top_p": 1e-6},
        {"temperature": 1.7, "min_p": 1},
    ],
    ids=lambda given: next(reversed(given)),
)
async def test_what_leaves_one_token_to_choose_from_is_greedy(
    answers: Answers, parameters: dict[str, float]
) -> None:
    expected = answers.said(by_hand(likeliest, stop=(EOS,)))
    assert await answers.text(**parameters) == expected


@pytest.mark.parametrize("parameters", [{"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.2}])
async def test_drawn_tokens_are_among_those_that_are_left(
    answers: Answers, parameters: dict[str, float]
) -> None:
    found = await answers.ask(
        temperature=1.5, seed=3, logprobs=5, logit_bias={str(EOS): -100}, **parameters
    )
    entries = found["choices"][0]["logprobs"]
    seen = set()
    for token, chosen, top in zip(
        entries["tokens"], entries["token_logprobs"], entries["top_logprobs"], strict=True
    ):
        likely = sorted((each for name, each in top.items() if name != "<|im_end|>"), reverse=True)
        if "top_k" in parameters:
            assert chosen >= likely[2]
        if "min_p" in parameters:  # min_p compares probabilities after the temperature
            assert chosen / 1.5 >= likely[0] / 1.5 + torch.tensor(0.5).log().item() - 1e-4
        seen.add(token)
    assert (
        await answers.text(temperature=0, logit_bias={str(EOS): -100})
        != found["choices"][0]["text"]
    )
    assert len(seen) > 1


async def test_biases_force_and_forbid(answers: Answers) -> None:
    forced = await answers.text(temperature=1, logit_bias={"600": 100}, max_tokens=5)
    assert forced == answers.said([600] * 5)
    first = by_hand(likeliest_word)[0]
    forbidden = {str(first): -100, str(EOS): -100}

    def without(row: torch.Tensor, text: list[int]) -> int:
        row = row.clone()
        row[[first, EOS]] = -100.0
        return int(row.argmax())

    found = await answers.text(temperature=0, logit_bias=forbidden)
    assert found == answers.said(by_hand(without))


@pytest.mark.parametrize(
    ("parameters", "penalised"),
    [
        ({"frequency_penalty": 1.5}, lambda logit, count: logit - 1.5 * count),
        ({"presence_penalty": 1.5}, lambda logit, count: logit - 1.5 * (count > 0)),
        ({"repetition_penalty": 1.8}, lambda logit, _: logit / 1.8 if logit > 0 else logit * 1.8),
    ],
    ids=["frequency", "presence", "repetition"],
)
async def test_penalties_are_those_of_their_formulas(
    answers: Answers, parameters: dict[str, float], penalised: Callable[[float, int], float]
) -> None:
    def choose(row: torch.Tensor, text: list[int]) -> int:
        row = row.clone()
        row[EOS] = -1000.0
        for token in set(text):
            row[token] = penalised(float(row[token]), text.count(token))
        return int(row.argmax())

    found = await answers.text(temperature=0, logit_bias={str(EOS): -100}, **parameters)
    assert found == answers.said(by_hand(choose))
    assert by_hand(choose) != by_hand(likeliest_word), "nothing was penalised"


async def test_the_best_of_several_is_the_likeliest_and_logprobs_are_the_models_own(
    answers: Answers,
) -> None:
    options = {"temperature": 1.0, "seed": 11, "logit_bias": {str(EOS): -100}, "max_tokens": 8}
    every = await answers.ask(n=4, logprobs=0, **options)
    means = [sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in every["choices"]]
    texts = [choice["text"] for choice in every["choices"]]
    assert len(set(texts)) == 4, "the choices draw from streams of their own"
    best = await answers.ask(best_of=4, n=1, **options)
    assert best["choices"][0]["text"] == texts[means.index(max(means))]
    assert best["usage"]["completion_tokens"] == 32, "all are computed, and paid"

    greedy = await answers.ask(temperature=0, logprobs=2, max_tokens=1)
    row = logits_after(*PROMPT[-2:]).log_softmax(dim=0)
    assert greedy["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        [float(row.max())], abs=1e-4
    )


async def test_the_same_seed_gives_the_same_text_whatever_shares_the_batch(
    answers: Answers, engine_worker: EngineWorker
) -> None:
    drawn = {"temperature": 0.6, "logit_bias": {str(EOS): -100}, "max_tokens": 60}
    alone = await answers.text(seed=5, **drawn)
    others = [answers.text(seed=100 + index, **drawn) for index in range(6)]
    greedy = answers.text(temperature=0, ignore_eos=True, max_tokens=90)
    among, *rest = await asyncio.gather(answers.text(seed=5, **drawn), *others, greedy)
    assert among == alone
    assert len({among, *rest}) == 8
    assert engine_worker.engine.stats.num_accepted_drafts > 0


async def test_what_was_guessed_is_told_with_the_timing_and_kept_with_the_usage(
    answers: Answers, platform: Platform, engine_worker: EngineWorker
) -> None:
    found = await answers.ask(temperature=0, ignore_eos=True, max_tokens=100)
    timing = found["timing"]
    stats = engine_worker.engine.stats
    assert timing["draft_tokens"] == stats.num_drafts > 0
    assert timing["accepted_draft_tokens"] == stats.num_accepted_drafts > 0
    await platform.settled()
    kept = await platform.client.get(
        f"/v1/generations/{found['id']}", headers=platform.customer.headers
    )
    assert kept.json()["timing"]["draft_tokens"] == timing["draft_tokens"]
    assert kept.json()["timing"]["accepted_draft_tokens"] == timing["accepted_draft_tokens"]
    assert kept.json()["completion_tokens"] == 100
