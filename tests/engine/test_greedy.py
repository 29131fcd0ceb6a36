"""In fp32 the engine's greedy output is that of transformers' `generate`, token for token."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import ModelRefused
from engine.messages import Sampling
from engine.model_runner import ModelRunner
from engine.models.decoder import load_decoder
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from tests.engine.driver import Driver, request
from tests.engine.tiny import generated, save_tiny
from tests.kernels.cpu_builds import built

THETA = {"rope_theta": 10_000.0}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
WINDOWS = {"use_sliding_window": True, "sliding_window": 33}


@pytest.fixture(params=["torch", "cpp"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Each test once in plain torch and once with the compiled kernels."""
    if request.param == "cpp":
        library.enable(built(NATIVE), 2)
    yield request.param
    library.disable()


def driver_of(directory: Path, num_blocks: int = 64, **settings: object) -> Driver:
    model = load_decoder(directory, torch.float32, torch.device("cpu"))
    runner = ModelRunner(model, num_blocks)
    return Driver(Engine(runner, EngineSettings(**settings), num_blocks))  # type: ignore[arg-type]


def prompts_of_mixed_lengths(count: int, vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 3, 17, 40, 63, 64, 65, 100, 128, 129, 150, 7, 30, 90, 12, 70][:count]
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, linear rope": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama 3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, late windows": ("Qwen2Config", WINDOWS | {"max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 33}),
}
RARER_FAMILIES = [name for name in FAMILIES if name not in ("llama", "qwen3")]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in RARER_FAMILIES)],
)
def test_families_generate_what_transformers_does(
    family: str, tmp_path: Path, backend: str
) -> None:
    name, changes = FAMILIES[family]
    save_tiny(name, tmp_path, **changes)
    prompts = prompts_of_mixed_lengths(16)
    expected = generated(tmp_path, prompts, 24)
    alone = [driver_of(tmp_path).generate([request("a", prompt, 24)])[0] for prompt in prompts[::5]]
    assert alone == expected[::5]
    batch = driver_of(tmp_path, max_step_tokens=128)
    assert batch.generate([request(f"r{i}", p, 24) for i, p in enumerate(prompts)]) == expected
    again = [request(f"again{i}", p, 24) for i, p in enumerate(prompts)]
    assert batch.generate(again) == expected, "now from the prefix cache"
    assert batch.received["again10", 0].num_cached_tokens == 128


@pytest.mark.slow
@pytest.mark.usefixtures("eager_admission")
def test_preempted_sequences_generate_what_transformers_does(tmp_path: Path, backend: str) -> None:
    save_tiny("LlamaConfig", tmp_path)
    prompts = prompts_of_mixed_lengths(16)
    scarce = driver_of(tmp_path, num_blocks=6)
    outputs = scarce.generate([request(f"r{i}", p, 70) for i, p in enumerate(prompts)])
    assert scarce.engine.stats.num_preemptions > 0
    assert outputs == generated(tmp_path, prompts, 70)


@pytest.fixture(scope="module")
def default_model_output(default_model_directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [prompt for prompt in prompts_of_mixed_lengths(16, 40_000) if len(prompt) > 1]
    return prompts, generated(default_model_directory, prompts, 16)


@pytest.mark.slow
def test_the_default_model_generates_what_transformers_does(
    default_model_directory: Path,
    default_model_output: tuple[list[list[int]], list[list[int]]],
    backend: str,
) -> None:
    prompts, expected = default_model_output
    engine = driver_of(default_model_directory, num_blocks=80)
    outputs = engine.generate([request(f"r{i}", p, 16) for i, p in enumerate(prompts)])
    assert outputs == expected


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    import transformers

    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_tiny("LlamaConfig", whole)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    prompt = list(range(50))
    assert driver_of(sharded).generate([request("a", prompt, 10)]) == generated(whole, [prompt], 10)
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    with pytest.raises(ModelRefused, match=r"shard .* is missing"):
        driver_of(sharded)


def test_logprobs_are_the_models_own_and_the_likeliest_come_first(tmp_path: Path) -> None:
    import transformers

    save_tiny("LlamaConfig", tmp_path)
    prompt = list(range(20))
    run = driver_of(tmp_path)
    wanted = Sampling(temperature=0, num_logprobs=3, logit_bias={7: 1000.0})
    (output,) = run.generate([request("a", prompt, 1, sampling=wanted)])
    assert output == [7], "the bias decides what is chosen"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (logprob,) = run.received["a", 0].logprobs
    assert logprob.logprob == pytest.approx(float(expected[7]), abs=1e-3)
    assert [token for token, _ in logprob.top] == expected.topk(3).indices.tolist()
    values = [value for _, value in logprob.top]
    assert values == pytest.approx(expected.topk(3).values.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "unknown structure"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3"),
        ({"hidden_size": 32}, "shape"),
        ({"vocab_size": 321}, "shape"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_hosted_is_refused_in_one_sentence(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save_tiny("LlamaConfig", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelRefused, match=sentence):
        driver_of(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "garbage", "cut"])
def test_damaged_files_are_refused_in_one_sentence(damage: str, tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "garbage":
        (tmp_path / "config.json").write_text("{")
    else:
        weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelRefused):
        driver_of(tmp_path)


def test_a_missing_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny("LlamaConfig", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match="up_proj"):
        driver_of(tmp_path)
