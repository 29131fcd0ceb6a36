"""Two and four ranks compute what one does, through the real engine; a rank that dies is noticed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import ModelRefused, RankLost
from engine.messages import Sampling
from engine.model_runner import ModelRunner
from engine.models.checkpoint import read_json
from engine.models.decoder import load_decoder
from engine.models.decoder_config import DecoderConfig
from engine.parallel.leader import LeadingModel, load_leading
from engine.parallel.shards import Shard
from engine.settings import EngineSettings
from kernels.attention_metadata import AttentionMetadata
from tests.engine.driver import Driver, create_driver, request
from tests.engine.tiny import save_tiny

CPU = torch.device("cpu")
PROMPTS = [[7 * i % 320, 3, 11, *range(20, 20 + 15 * i)] for i in range(1, 7)]
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES = {
    "heads for each, biases of sums": ("LlamaConfig", {"num_key_value_heads": 4} | BIASES, 2),
    "KV heads that ranks share": ("Qwen2Config", {"vocab_size": 321}, 4),
    "tied, norms of heads": ("Qwen3Config", {"tie_word_embeddings": True, "vocab_size": 319}, 2),
}


@pytest.fixture(params=FAMILIES, ids=str)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    family, changes, size = FAMILIES[request.param]
    save_tiny(family, tmp_path, **changes)
    return tmp_path, size


def logits_of(model: object, prompt: list[int]) -> torch.Tensor:
    num_blocks = -(-len(prompt) // 64)
    metadata = AttentionMetadata.build(
        query_lens=[len(prompt)], context_lens=[len(prompt)], block_tables=[list(range(num_blocks))]
    )
    with torch.inference_mode():
        return model.forward(  # type: ignore[attr-defined, no-any-return]  # of either kind
            torch.tensor(prompt),
            model.create_kv_cache(num_blocks),  # type: ignore[attr-defined]  # see above
            metadata,
            torch.arange(len(prompt)),
        )


@pytest.mark.slow
def test_ranks_compute_what_one_does(shared: tuple[Path, int]) -> None:
    directory, size = shared
    whole = load_decoder(directory, torch.float32, CPU)
    leading = load_leading(directory, torch.float32, CPU, size)
    for prompt in (PROMPTS[0], list(range(5, 135))):
        difference = logits_of(leading, prompt) - logits_of(whole, prompt)
        scale = logits_of(whole, prompt).abs().max()
        assert difference.abs().max() <= 1e-5 * max(1.0, float(scale))

    requests = [request(f"r{i}", prompt, 40 + i) for i, prompt in enumerate(PROMPTS)]
    drawn = Sampling(temperature=1.0, seed=3)
    requests.append(request("many", PROMPTS[2], 20, sampling=drawn, num_choices=3))
    run = driver(leading)
    expected = create_driver(whole, 20, max_running=8)
    assert run.generate(requests) == expected.generate(requests)
    assert run.received.keys() == expected.received.keys()


def driver(model: LeadingModel) -> Driver:
    """Few blocks and slots: copies of forked blocks and preemption happen on all ranks."""
    settings = EngineSettings(max_running=8)
    return Driver(Engine(ModelRunner(model, 20), settings, 20))


@pytest.mark.slow
def test_a_killed_rank_is_noticed_within_a_step(tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    leading = load_leading(tmp_path, torch.float32, CPU, 2)
    run = driver(leading)
    run.add(request("a", PROMPTS[0], 200))
    for _ in range(5):
        run.step()
    os.kill(leading.followers.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost):
        step_three_times(run)
    assert len(run.received["a", 0].token_ids) >= 5


def step_three_times(run: Driver) -> None:
    for _ in range(3):
        run.step()


def test_what_cannot_be_shared_evenly_is_refused(tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    config = DecoderConfig.parse(read_json(tmp_path / "config.json"))
    with pytest.raises(ModelRefused, match="4 heads, 2 KV heads and 96 channels cannot be shared"):
        Shard(config, rank=0, size=3)
    for size in (1, 2, 4):
        shards = [Shard(config, rank, size) for rank in range(size)]
        tokens = [token for shard in shards for token in range(config.vocab_size)[shard.vocabulary]]
        assert tokens == list(range(config.vocab_size))
