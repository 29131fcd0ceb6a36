"""A KV cache of 8-bit floats, by the operator's choice: its scales, its size, and what it computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.memory.footprint import read_footprint
from engine.models.choice import load_model
from engine.models.decoder import Decoder, load_decoder
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import FLOAT8
from tests.engine.driver import Driver, request
from tests.engine.tiny import save_tiny

CPU = torch.device("cpu")
PROMPT = [7, 3, 11, *range(20, 150)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny("Qwen2Config", tmp_path / "plain", initializer_range=0.1)
    return tmp_path / "plain"


def with_scales(directory: Path, scales: dict[str, list[float]]) -> Path:
    """The same checkpoint with scales of its own for layer 0, 1 and 2."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, values in scales.items():
        for layer, value in enumerate(values):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value])
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Of a prompt in two chunks and of a decode after it."""
    kv_cache = decoder.create_kv_cache(3)
    out = []
    with torch.inference_mode():
        for start, end in ((0, 70), (70, 132), (132, 133)):
            metadata = AttentionMetadata.build(
                query_lens=[end - start], context_lens=[end], block_tables=[[1, 2, 0]]
            )
            tokens = torch.tensor(PROMPT[start:end])
            rows = torch.tensor([end - start - 1])
            out.append(decoder.forward(tokens, kv_cache, metadata, rows))
    return torch.cat(out)


def test_measured_scales_leave_room_and_lose_little(directory: Path) -> None:
    exact = load_decoder(directory, torch.float32, CPU)
    rounded = load_decoder(directory, torch.float32, CPU, kv_dtype=FLOAT8)
    scales = rounded.kv_scales
    assert scales is not None
    assert str(scales) == "8-bit KV cache with measured scales"
    cache = exact.create_kv_cache(3)
    exact.run_prompt(torch.tensor(PROMPT), cache)
    for layer in range(3):
        for pages, found in ((cache.keys, scales.keys), (cache.values, scales.values)):
            largest = pages[layer].abs().amax(dim=(0, 2, 3)) / found[layer]
            assert ((largest > 448 / 8) & (largest < 448)).all(), "of another prompt"
            assert torch.equal(found[layer].log2(), found[layer].log2().round())
    expected, found = logits_of(exact), logits_of(rounded)
    span = expected.max() - expected.min()
    assert 0 < (found - expected).abs().max() < 0.04 * span


def test_a_block_takes_as_many_bytes_as_its_elements(directory: Path) -> None:
    exact = load_decoder(directory, torch.bfloat16, CPU)
    rounded = load_decoder(directory, torch.bfloat16, CPU, kv_dtype=FLOAT8)
    assert exact.spec.bytes_per_block == 2 * rounded.spec.bytes_per_block
    of_weights, of_cache = (
        read_footprint(directory, 2),
        read_footprint(directory, 2, bytes_per_kv_element=1),
    )
    assert of_weights.kv_bytes_per_token == 2 * of_cache.kv_bytes_per_token
    assert of_weights.weight_bytes == of_cache.weight_bytes


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale")],
)
def test_the_scales_of_a_checkpoint_are_taken(directory: Path, names: tuple[str, str]) -> None:
    given = dict(zip(names, ([0.5, 0.25, 2.0], [0.03, 0.5, 1.0]), strict=True))
    decoder = load_decoder(with_scales(directory, given), torch.float32, CPU, kv_dtype=FLOAT8)
    cache = decoder.create_kv_cache(1)
    assert str(decoder.kv_scales) == "8-bit KV cache with the checkpoint's scales"
    for name, found in zip(names, (cache.key_scales, cache.value_scales), strict=True):
        assert torch.equal(found, torch.tensor(given[name])[:, None].expand(3, 2))


@pytest.mark.parametrize("wrong", [[0.5, 0.0, 1.0], [0.5, float("nan"), 1.0], [0.5, 0.5]])
def test_scales_that_cannot_be_right_are_refused(directory: Path, wrong: list[float]) -> None:
    path = with_scales(directory, {"k_scale": wrong, "v_scale": [1.0, 1.0, 1.0]})
    with pytest.raises(ModelRefused, match=r"model\.layers\.[12]\.self_attn\.k_scale"):
        load_decoder(path, torch.float32, CPU, kv_dtype=FLOAT8)


def test_an_engine_has_twice_the_tokens_and_says_what_it_keeps(
    directory: Path, tmp_path: Path
) -> None:
    engines = [
        load_engine(
            directory,
            EngineSettings(dtype="bf16", kv_cache_dtype=kind, calibration_cache=tmp_path),
            pool_bytes=1 << 20,
        )
        for kind in ("auto", "fp8")
    ]
    exact, rounded = (loaded.engine.stats.total_kv_tokens for loaded in engines)
    assert 2 * exact <= rounded <= 2 * exact + 64
    assert "KV cache" not in str(engines[0].report)
    assert "8-bit KV cache with measured scales, in plain torch: slower than an exact one" in str(
        engines[1].report
    )
    answers = Driver(engines[1].engine).generate([request(f"r{i}", PROMPT, 20) for i in range(3)])
    assert len(answers[0]) == 20
    assert answers[0] == answers[1] == answers[2]


def test_what_has_none_is_refused_in_one_sentence(directory: Path, tmp_path: Path) -> None:
    save_tiny("GPT2Config", tmp_path / "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=256)
    with pytest.raises(ModelRefused, match="only models of the fused tier have an 8-bit KV cache"):
        load_model(tmp_path / "gpt2", torch.float32, CPU, is_kv_float8=True)
    settings = EngineSettings(dtype="fp32", kv_cache_dtype="fp8", tensor_parallel=2)
    with pytest.raises(ModelRefused, match="an 8-bit KV cache cannot be shared by several ranks"):
        load_engine(directory, settings)
