"""How likely the tokens of a prompt were: exactly what one forward over all of it says, told once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.broker.stream import RequestStream
from engine.engine import Engine
from engine.messages import GenerateRequest, PromptLogprobs, Sampling, TokenFrame
from engine.model_runner import ModelRunner
from engine.models.choice import load_model
from engine.models.decoder import load_decoder
from engine.models.model import Model
from engine.scheduling import scheduler
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import built

NUM_TOP = 3
SCORED = Sampling(temperature=0.0, num_prompt_logprobs=NUM_TOP)
VOCAB = 320


@dataclass(frozen=True)
class Told:
    """All that was told of one prompt."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def told(parts: list[PromptLogprobs], first: int = 1) -> Told:
    """The parts as one; they follow each other without a gap and without a repetition."""
    for part in parts:
        assert part.first_position == first
        first = part.end

    def joined(pieces: list[bytes], dtype: str, width: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(b"".join(pieces), dtype).copy()).view(-1, width)

    return Told(
        joined([part.logprobs for part in parts], "<f4", 1)[:, 0],
        joined([part.ranks for part in parts], "<i4", 1)[:, 0],
        joined([part.top_ids for part in parts], "<i4", NUM_TOP),
        joined([part.top_logprobs for part in parts], "<f4", NUM_TOP),
    )


def assert_exact(found: Told, directory: Path, prompt: list[int], first: int = 1) -> None:
    """`found` is what transformers' forward over the whole prompt says, from `first` on."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, first - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    ids = torch.tensor(prompt[first:])
    chosen = expected.gather(1, ids[:, None])
    torch.testing.assert_close(found.logprobs, chosen[:, 0], atol=2e-3, rtol=1e-3)
    top = expected.topk(NUM_TOP, dim=-1)
    torch.testing.assert_close(found.top_logprobs, top.values, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        expected.gather(1, found.top_ids.long()), top.values, atol=2e-3, rtol=1e-3
    )
    is_near = (expected - chosen).abs() < 5e-3
    above = (expected > chosen).sum(dim=1)
    assert ((found.ranks - 1 - above).abs() <= is_near.sum(dim=1)).all()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", path)
    return path


@pytest.fixture(params=["torch", "cpp"])
def model(request: pytest.FixtureRequest, directory: Path) -> Iterator[Model]:
    if request.param == "cpp":
        library.enable(built(NATIVE), 2)
    yield load_decoder(directory, torch.float32, torch.device("cpu"))
    library.disable()


def driver_of(model: Model, num_blocks: int = 64, **settings: object) -> Driver:
    engine_settings = EngineSettings(**settings)  # type: ignore[arg-type]
    return Driver(Engine(ModelRunner(model, num_blocks), engine_settings, num_blocks))


@pytest.mark.parametrize("max_step_tokens", [64, 4096])
def test_it_is_what_one_forward_over_the_whole_prompt_says(
    model: Model, directory: Path, max_step_tokens: int
) -> None:
    driver = driver_of(model, max_step_tokens=max_step_tokens)
    prompts = {f"r{length}": prompt_of(length) for length in (1, 2, 64, 65, 130, 300)}
    asked = [request(name, prompt, 3, sampling=SCORED) for name, prompt in prompts.items()]
    driver.generate([*asked, request("plain", prompt_of(90), 3)])
    assert not driver.received["plain", 0].prompt_logprobs
    assert not driver.received["r1", 0].prompt_logprobs, "the first token has none"
    for name, prompt in prompts.items():
        if len(prompt) > 1:
            parts = driver.received[name, 0].prompt_logprobs
            assert_exact(told(parts), directory, prompt)
    assert len(driver.received["r300", 0].prompt_logprobs) > 1


def test_a_step_never_computes_more_rows_than_it_may(
    model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PROMPT_ROWS_MAX", 100)
    most = 0
    forward = model.forward

    def counting(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(arguments[3]))
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", counting)
    driver = driver_of(model)
    prompts = [prompt_of(length) for length in (150, 260, 70)]
    driver.generate([request(str(n), p, 2, sampling=SCORED) for n, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert_exact(told(driver.received[str(number), 0].prompt_logprobs), directory, prompt)
    assert 64 <= most <= 100 + len(prompts)


def test_the_prefix_cache_is_passed_over_and_filled(model: Model, directory: Path) -> None:
    driver = driver_of(model)
    prompt = prompt_of(200)
    driver.generate([request("first", prompt, 2)])
    driver.generate([request("scored", prompt, 2, sampling=SCORED)])
    assert driver.received["scored", 0].num_cached_tokens == 0
    assert_exact(told(driver.received["scored", 0].prompt_logprobs), directory, prompt)
    other = prompt_of(200, seed=2)
    driver.generate([request("other", other, 2, sampling=SCORED)])
    driver.generate([request("again", other, 2)])
    assert driver.received["again", 0].num_cached_tokens == 192


@pytest.mark.usefixtures("eager_admission")
def test_preempted_prompts_are_told_once(model: Model, directory: Path) -> None:
    driver = driver_of(model, num_blocks=6)
    lengths = (40, 63, 64, 65, 100, 128, 129, 150, 30, 90, 12, 70)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    driver.generate([request(str(n), p, 70, sampling=SCORED) for n, p in enumerate(prompts)])
    assert driver.engine.stats.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        assert_exact(told(driver.received[str(number), 0].prompt_logprobs), directory, prompt)


@pytest.mark.parametrize("is_prefix_cache_on", [True, False])
def test_a_prompt_that_is_preempted_half_way_goes_on(
    model: Model, directory: Path, is_prefix_cache_on: bool
) -> None:
    driver = driver_of(model, max_step_tokens=64, is_prefix_cache_on=is_prefix_cache_on)
    prompt = prompt_of(250)
    driver.add(request("r", prompt, 2, sampling=SCORED))
    for _ in range(2):
        driver.step()
    [half] = driver.engine._scheduler.paused
    assert half.prompt_logprobs_from == 129
    driver.engine._scheduler._preempt(half)
    driver.run()
    assert_exact(told(driver.received["r", 0].prompt_logprobs), directory, prompt)


def test_choices_share_one_telling(model: Model, directory: Path) -> None:
    driver = driver_of(model)
    prompt = prompt_of(130)
    driver.generate([request("r", prompt, 4, sampling=SCORED, num_choices=3)])
    assert_exact(told(driver.received["r", 0].prompt_logprobs), directory, prompt)
    assert not any(driver.received["r", choice].prompt_logprobs for choice in (1, 2))
    assert len({tuple(driver.received["r", choice].token_ids) for choice in range(3)}) == 1


def test_what_was_told_before_a_failover_is_not_told_again(model: Model, directory: Path) -> None:
    driver = driver_of(model)
    prompt = prompt_of(200)
    whole = driver.generate([request("whole", prompt, 6)])[0]
    driver.generate(
        [request("half", prompt, 6, sampling=SCORED, attempt=2, first_prompt_logprob=130)]
    )
    half = driver.received["half", 0]
    assert half.num_cached_tokens == 128, "what is told already may come from the cache"
    assert_exact(told(half.prompt_logprobs, 130), directory, prompt, 130)
    resumed = request(
        "all", prompt, 6, sampling=SCORED, emitted=tuple(whole[:2]), first_prompt_logprob=200
    )
    driver.generate([resumed])
    assert driver.received["all", 0].prompt_logprobs == []
    assert driver.received["all", 0].token_ids == whole[2:]


FAMILIES: dict[str, tuple[dict[str, int], str]] = {
    "GptOssConfig": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "attention hook"),
    "BloomConfig": ({}, "own cache, in chunks"),
    "MambaConfig": ({}, "own cache, with whole prompts"),
    "OpenAIGPTConfig": ({"n_positions": 512}, "own cache, without a cache"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_tiers_tell_the_same(family: str, tmp_path: Path) -> None:
    changes, tier = FAMILIES[family]
    save_tiny(family, tmp_path, **changes)
    model, report = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert report.tier == tier
    driver = driver_of(model, max_step_tokens=64)
    prompts = [prompt_of(length) for length in (150, 40)]
    driver.generate([request(str(n), p, 3, sampling=SCORED) for n, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert_exact(told(driver.received[str(number), 0].prompt_logprobs), tmp_path, prompt)


# at the gateway


def part(first: int, *values: float, attempt: int = 1) -> TokenFrame:
    logprobs = PromptLogprobs(
        first_position=first,
        num_tokens=len(values),
        logprobs=np.array(values, "<f4").tobytes(),
        ranks=np.arange(len(values), dtype="<i4").tobytes(),
        num_top=1,
        top_ids=np.arange(first, first + len(values), dtype="<i4").tobytes(),
        top_logprobs=np.array(values, "<f4").tobytes(),
    )
    return TokenFrame("r", attempt, 0, (), prompt_logprobs=logprobs)


async def cancel(request: GenerateRequest) -> None:
    raise AssertionError("nobody cancels")


def stream_of(prompt: list[int]) -> RequestStream:
    asked = request("r", prompt, 6, sampling=SCORED)
    return RequestStream(asked, cancel=cancel)


async def test_parts_are_received_once_whoever_sends_them() -> None:
    stream = stream_of(list(range(6)))
    assert stream.receive(part(1, -1.0, -2.0), "one")
    assert stream.is_running
    stream.restart()
    assert stream.request.first_prompt_logprob == 3
    assert stream.receive(part(1, -1.0, -2.0, attempt=2), "two"), "repeated, and dropped"
    assert stream.receive(part(2, -2.0, -3.0, -4.0, attempt=2), "two"), "half of it is new"
    assert stream.receive(part(5, -5.0, attempt=2), "two")
    frames = [await anext(stream) for _ in range(3)]
    assert not stream.has_frames
    received = [frame.prompt_logprobs for frame in frames]
    assert [(told.first_position, told.num_tokens) for told in received if told] == [
        (1, 2),
        (3, 2),
        (5, 1),
    ]
    values = np.frombuffer(b"".join(told.logprobs for told in received if told), "<f4")
    assert values.tolist() == [-1, -2, -3, -4, -5]
    ids = np.frombuffer(b"".join(told.top_ids for told in received if told), "<i4")
    assert ids.tolist() == [1, 2, 3, 4, 5]


def test_a_part_that_was_lost_on_its_way_is_missed() -> None:
    stream = stream_of(list(range(6)))
    assert not stream.receive(part(2, -2.0), "one"), "the first one is missing"
    assert stream.receive(part(1, -1.0, -2.0), "one")
    token = TokenFrame("r", 1, 0, (7,))
    assert not stream.receive(token, "one"), "the rest should have come before it"
    assert stream.receive(part(3, -3.0, -4.0, -5.0), "one")
    assert stream.receive(token, "one")
