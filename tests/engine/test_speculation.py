"""With drafts or without them an engine says the same: tokens, log-probabilities, fences, ends."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.messages import CostModel, GenerateRequest, Sampling
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder, load_decoder
from engine.models.model import Model
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from tests.engine.driver import Driver, request
from tests.engine.fake_model import FakeModel, expected_output, repeating_token
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import built

COST = CostModel(
    base_s=0.02, per_token_s=1e-4, per_prefill_context_s=1e-9, per_decode_context_s=1e-9
)
"""Of a machine on which drafts cost next to nothing."""
RHYTHM = [11, 12, 13, 14, 15, 16, 17, 18, 19]
says = functools.partial(expected_output, says=repeating_token)


def driver(model: Model, num_blocks: int = 64, **options: object) -> Driver:
    """Its clock goes on by a millisecond a look."""
    engine_settings = EngineSettings(**options)  # type: ignore[arg-type]
    clock = functools.partial(next, itertools.count(step=1_000))
    runner = ModelRunner(model, num_blocks)
    return Driver(Engine(runner, engine_settings, num_blocks, cost_model=COST, now_us=clock))


def repeating(num_blocks: int = 64, context_length: int = 4096, **options: object) -> Driver:
    return driver(FakeModel(context_length, repeating_token), num_blocks, **options)


def num_steps(run: Driver) -> int:
    return run.engine.stats.num_steps


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    run, plain = repeating(), repeating(is_speculation_on=False)
    asked = request("a", RHYTHM * 4, 300)
    assert run.generate([asked]) == plain.generate([asked]) == [says(RHYTHM * 4, 300)]
    assert num_steps(run) < num_steps(plain) / 2.5
    stats = run.engine.stats
    assert stats.output_tokens_total == 300
    assert 150 < stats.num_accepted_drafts < stats.num_drafts
    assert plain.engine.stats.num_drafts == 0


def test_each_frame_of_a_run_goes_on_where_the_last_one_ended() -> None:
    run = repeating()
    run.generate([request("a", RHYTHM * 4, 100)])
    frames = run.received["a", 0].frames
    assert max(len(frame.token_ids) for frame in frames) > 3
    assert sum(frame.num_drafts for frame in frames) == run.engine.stats.num_drafts
    accepted = [len(frame.token_ids) - 1 for frame in frames if frame.num_drafts]
    assert sum(accepted) == run.engine.stats.num_accepted_drafts


@pytest.mark.parametrize("fence", [*range(1, 40), 64, 100])
def test_a_fence_inside_a_run_is_never_passed_and_the_text_goes_on_behind_it(fence: int) -> None:
    run = repeating()
    run.add(request("a", RHYTHM * 4, 150, authorized=fence))
    run.run()
    assert run.received["a", 0].token_ids == says(RHYTHM * 4, fence)
    assert run.engine.stats.num_parked == 1
    assert run.engine.stats.output_tokens_total == fence, "what is sampled is what is billed"
    run.engine.extend("a", 150)
    run.run()
    assert run.received["a", 0].token_ids == says(RHYTHM * 4, 150)
    assert run.received["a", 0].finish_reason == "length"


@pytest.mark.parametrize("limit", [1, 2, 37, 38, 39, 40])
def test_the_limit_of_tokens_and_that_of_the_context_are_met_exactly(limit: int) -> None:
    prompt = RHYTHM * 4
    run = repeating(context_length=len(prompt) + limit)
    for name, num_tokens in (("asked", limit), ("context", 1000)):
        run.generate([request(name, prompt, num_tokens)])
        assert run.received[name, 0].token_ids == says(prompt, limit)
        assert run.received[name, 0].finish_reason == "length"


@pytest.mark.parametrize("at", range(20, 32))
def test_a_stop_id_inside_a_run_ends_it_there(at: int) -> None:
    text = says(RHYTHM * 4, 200)
    stop = (text[at],)
    run = repeating()
    run.generate([request("a", RHYTHM * 4, 200, sampling=Sampling(0, stop_token_ids=stop))])
    received = run.received["a", 0]
    assert received.token_ids == text[: text.index(text[at]) + 1]
    assert (received.finish_reason, received.stop_token_id) == ("stop", text[at])


def test_what_was_guessed_wrong_is_never_found_by_the_prefix_cache() -> None:
    run = repeating()
    run.generate([request("a", RHYTHM * 4, 300)])
    text = RHYTHM * 4 + says(RHYTHM * 4, 300)
    run.generate([request("again", text, 20)])
    assert run.received["again", 0].num_cached_tokens == len(text) // 64 * 64
    assert run.received["again", 0].token_ids == says(text, 20)


def test_choices_of_one_prompt_draft_each_for_itself() -> None:
    run = repeating()
    run.add(request("a", RHYTHM * 8, 90, num_choices=3))
    run.run()
    texts = [run.received["a", choice].token_ids for choice in range(3)]
    assert texts == [says(RHYTHM * 8, 90)] * 3
    assert run.engine.stats.num_accepted_drafts > 90


def test_a_row_without_a_finite_logit_ends_its_request_after_what_was_said_before() -> None:
    model = FakeModel(says=repeating_token)
    text = says(RHYTHM * 4, 60)
    model.nan_on_token = next(token for token in text if token not in RHYTHM)
    run = driver(model)
    run.add(request("a", RHYTHM * 4, 60))
    run.run()
    received = run.received["a", 0]
    assert received.error == "the model computed no finite logit"
    assert received.token_ids == text[: text.index(model.nan_on_token) + 1]


@pytest.mark.usefixtures("eager_admission")
def test_preempted_in_the_middle_beside_others_they_all_say_the_same() -> None:
    prompts = [RHYTHM * n + [n] for n in (3, 5, 6, 9)]
    run = repeating(num_blocks=6, max_step_tokens=64)
    asked = [request(f"r{index}", prompt, 120) for index, prompt in enumerate(prompts)]
    assert run.generate(asked) == [says(prompt, 120) for prompt in prompts]
    assert run.engine.stats.num_preemptions > 0
    assert run.engine.stats.num_accepted_drafts > 0


def test_a_cancelled_one_leaves_nothing_behind() -> None:
    run = repeating()
    run.add(request("a", RHYTHM * 8, 500))
    run.add(request("b", RHYTHM * 7, 40))
    while run.engine.stats.num_accepted_drafts < 20:
        run.step()
    run.engine.cancel("a")
    run.run()
    assert run.received["b", 0].token_ids == says(RHYTHM * 7, 40)
    assert run.engine.stats.free_kv_tokens == run.engine.stats.total_kv_tokens


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=90), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 140), min_size=4, max_size=4),
    num_blocks=st.integers(12, 30),
)
def test_any_texts_side_by_side_are_those_without_drafts(
    prompts: list[list[int]], lengths: list[int], num_blocks: int
) -> None:
    run = repeating(num_blocks, max_step_tokens=128)
    pairs = list(zip(prompts, lengths, strict=False))
    asked = [request(f"r{index}", *pair) for index, pair in enumerate(pairs)]
    assert run.generate(asked) == [says(*pair) for pair in pairs]


# a real model on the compiled kernels: the same bits


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", path)
    return path


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def decoder(request: pytest.FixtureRequest, directory: Path) -> Iterator[Decoder]:
    library.enable(built(NATIVE), num_threads=2)
    yield load_decoder(directory, request.param, torch.device("cpu"))
    library.disable()


SAMPLINGS = {
    "greedy": Sampling(temperature=0, num_logprobs=3),
    "drawn": Sampling(temperature=0.6, top_k=12, top_p=0.9, seed=5, num_logprobs=2),
    "min_p": Sampling(temperature=1.0, min_p=0.2, seed=6, num_logprobs=0),
    "penalised": Sampling(
        temperature=0.4,
        repetition_penalty=1.05,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={12: 3.0, 13: 3.0, 14: -100.0},
        seed=7,
        num_logprobs=1,
    ),
    "held": Sampling(temperature=0.5, min_tokens=50, stop_token_ids=(12, 99), seed=8),
}
"""What a request may ask for, each beside the others in one batch."""


BIAS = dict.fromkeys(RHYTHM[:3], 14.0)
"""So few tokens are likely that the text repeats itself."""


def asked_of(name: str) -> GenerateRequest:
    sampling = SAMPLINGS[name]
    if sampling.logit_bias is None:
        sampling = msgspec.structs.replace(sampling, logit_bias=BIAS)
    return request(name, RHYTHM * 6 + [len(name)], 90, sampling=sampling)


def test_a_real_model_gives_the_same_bits_with_drafts_and_without(decoder: Decoder) -> None:
    run, plain = driver(decoder), driver(decoder, is_speculation_on=False)
    for each in (run, plain):
        each.generate([asked_of(name) for name in SAMPLINGS])
    assert run.engine.stats.num_accepted_drafts > 40, "nothing was tested"
    for name in SAMPLINGS:
        with_drafts, without = run.received[name, 0], plain.received[name, 0]
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.logprobs == without.logprobs, "bit for bit"
        assert with_drafts.finish_reason == without.finish_reason


def test_a_model_that_cannot_forget_never_drafts() -> None:
    """Recurrent states, and whatever else a model keeps by itself."""
    model = FakeModel(says=repeating_token)
    model.spec = replace(model.spec, can_rewind=False)
    run = driver(model)
    run.generate([request("a", RHYTHM * 4, 60)])
    assert run.engine.stats.num_drafts == 0
