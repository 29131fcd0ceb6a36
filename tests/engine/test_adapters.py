"""LoRA adapters compute what merged weights do, in one batch with their base and with each other."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.memory.footprint import read_adapter_footprint
from engine.messages import GenerateRequest
from engine.models.adapters.rows import AdapterRows
from engine.models.adapters.weights import read_adapter
from engine.models.choice import load_model
from engine.models.decoder import Decoder, load_decoder
from engine.models.model import Model
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from tests.engine.driver import Driver, create_driver, request
from tests.engine.lora import PROJECTIONS, merge, save_adapter
from tests.engine.test_invariance import PRECISIONS
from tests.engine.tiny import generated, save_tiny
from tests.kernels.cpu_builds import built

CPU = torch.device("cpu")
PROMPTS = [[7, 31, 5, 90, 12, 44], list(range(100, 180)), [3]]
NUM_TOKENS = 10
ATTENTION_ONLY = ("q_proj", "v_proj")
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "fused": ("LlamaConfig", {}, "fused"),
    "biases_and_norms": ("Qwen3Config", {"attention_bias": True}, "fused"),
    "attention hook": ("Olmo2Config", {}, "attention hook"),
    "own cache": ("MambaConfig", {"state_size": 8, "num_hidden_layers": 2}, "own cache"),
}


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled":
        library.enable(built(NATIVE), num_threads=2)
    yield request.param
    library.disable()


def asking(name: str, model: str, prompt: list[int], **options: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(name, prompt, NUM_TOKENS, **options), model=model)


def driver_of(model: Model, **adapters: Path) -> Driver:
    driver = create_driver(model)
    for name, directory in adapters.items():
        driver.engine.attach(name, read_adapter(directory))
    return driver


def load(directory: Path) -> tuple[Model, str]:
    model, report = load_model(directory, torch.float32, CPU)
    return model, report.tier


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_a_base_and_two_adapters_generates_what_the_merged_models_do(
    tmp_path: Path, family: str, kernels: str
) -> None:
    config, changes, tier = FAMILIES[family]
    base = tmp_path / "base"
    base.mkdir()
    save_tiny(config, base, **changes)
    targets = ("in_proj", "out_proj") if config == "MambaConfig" else PROJECTIONS
    save_adapter(base, tmp_path / "one", targets=targets, seed=1)
    few = targets[:1] if config == "MambaConfig" else ATTENTION_ONLY
    save_adapter(base, tmp_path / "two", targets=few, seed=2, rank=3, use_rslora=True)
    model, found_tier = load(base)
    assert found_tier.startswith(tier)
    driver = driver_of(model, one=tmp_path / "one", two=tmp_path / "two")
    asked = {
        name: [asking(f"{name}{index}", name, prompt) for index, prompt in enumerate(PROMPTS)]
        for name in ("base", "one", "two")
    }
    mixed = [new for news in zip(*asked.values(), strict=True) for new in news]
    driver.generate(mixed)
    for name, news in asked.items():
        merged = (
            base if name == "base" else merge(base, tmp_path / name, tmp_path / f"merged-{name}")
        )
        expected = generated(merged, PROMPTS, NUM_TOKENS)
        assert [driver.received[new.request_id, 0].token_ids for new in news] == expected, name
    texts = {
        name: str([driver.received[new.request_id, 0].token_ids for new in asked[name]])
        for name in asked
    }
    assert len(set(texts.values())) == 3, "each of them says something else"


def test_what_the_prefix_cache_keeps_is_found_by_the_same_adapter_only(tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    save_adapter(tmp_path, tmp_path / "one")
    model, _ = load(tmp_path)
    driver = driver_of(model, one=tmp_path / "one")
    prompt = list(range(150))
    cached = {}
    for name in ("base", "one", "one-again", "base-again"):
        driver.generate([asking(name, name.partition("-")[0], prompt)])
        cached[name] = driver.received[name, 0].num_cached_tokens
    assert cached == {"base": 0, "one": 0, "one-again": 128, "base-again": 128}
    driver.engine.detach("one")
    driver.engine.attach("one", read_adapter(tmp_path / "one"))
    driver.generate([asking("anew", "one", prompt)])
    assert driver.received["anew", 0].num_cached_tokens == 0, "it may be another one now"


def test_an_adapter_that_leaves_ends_what_runs_with_it_and_nothing_else(tmp_path: Path) -> None:
    save_tiny("LlamaConfig", tmp_path)
    save_adapter(tmp_path, tmp_path / "one")
    model, _ = load(tmp_path)
    driver = driver_of(model, one=tmp_path / "one")
    driver.add(asking("mine", "one", PROMPTS[0], num_choices=2))
    driver.add(asking("other", "base", PROMPTS[0]))
    driver.step()
    assert driver.engine.withdraw_waiting("one") == []
    driver.add(asking("waits", "one", PROMPTS[1]))
    assert driver.engine.withdraw_waiting() == []
    assert driver.engine.withdraw_waiting("one") == ["waits"]
    driver.engine.detach("one")
    driver.run()
    assert driver.received["other", 0].token_ids == generated(tmp_path, PROMPTS[:1], NUM_TOKENS)[0]
    assert driver.received["mine", 0].finish_reason is None
    assert sorted(driver.finished) == ["mine", "other"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_native", [False, True])
def test_rows_have_the_same_bits_whatever_adapters_share_the_step(
    tmp_path: Path, precision: str, *, is_native: bool
) -> None:
    save_tiny("LlamaConfig", tmp_path)
    for name, rank in (("one", 4), ("two", 33)):
        save_adapter(tmp_path, tmp_path / name, targets=(*PROJECTIONS, "lm_head"), rank=rank)
    if is_native and not library.enable(built(NATIVE), 1).has_native_bf16_dot:
        pytest.skip("this machine has no native bf16 dot product")
    library.enable(built(NATIVE), 2, native_bf16_dot=is_native)
    dtype, quantization = PRECISIONS[precision]
    decoder = load_decoder(tmp_path, dtype, CPU, quantization)
    for number, name in ((1, "one"), (2, "two")):
        decoder.attach(number, read_adapter(tmp_path / name))
    alone = [step(decoder, [(number, 90 + number)])[0] for number in range(3)]
    together = step(decoder, [(number, 90 + number) for number in (2, 0, 1, 0, 2)])
    for row, number in zip(together, (2, 0, 1, 0, 2), strict=True):
        assert torch.equal(row, alone[number])
    library.disable()
    assert not torch.equal(alone[1], alone[0])


@torch.inference_mode()
def step(decoder: Decoder, sequences: list[tuple[int, int]]) -> torch.Tensor:
    """Logits of the last token of each prompt (adapter, its length), all in one step."""
    adapters = np.array([adapter for adapter, _ in sequences], dtype=np.int32)
    lengths = [length for _, length in sequences]
    metadata = AttentionMetadata.build(
        query_lens=lengths,
        context_lens=lengths,
        block_tables=[[2 * index, 2 * index + 1] for index in range(len(sequences))],
    )
    tokens = torch.cat([torch.arange(length) * 3 % 320 for length in lengths])
    rows = metadata.query_start[1:].long() - 1
    cache = decoder.create_kv_cache(2 * len(sequences))
    if not adapters.any():
        return decoder.forward(tokens, cache, metadata, rows)
    groups = AdapterRows.build(adapters, metadata.query_start.numpy(), rows.numpy(), CPU)
    return decoder.forward_adapted(tokens, cache, metadata, rows, groups)


def test_an_adapter_of_int8_weights_is_near_the_merged_model(tmp_path: Path) -> None:
    """Smoothing moves factors through the weights; an adapter has to follow them."""
    base = tmp_path / "base"
    base.mkdir()
    save_tiny("LlamaConfig", base)
    save_adapter(base, tmp_path / "one", targets=(*PROJECTIONS, "lm_head"), alpha=32)
    library.enable(built(NATIVE), num_threads=2)
    quantised = load_decoder(base, torch.float32, CPU, "int8")
    quantised.attach(1, read_adapter(tmp_path / "one"))
    exact = load_decoder(merge(base, tmp_path / "one", tmp_path / "merged"), torch.float32, CPU)
    plain = step(load_decoder(base, torch.float32, CPU), [(0, 90)])
    found, expected = step(quantised, [(1, 90)]), step(exact, [(0, 90)])
    library.disable()
    assert float((found - expected).norm() / expected.norm()) < 0.2
    assert float((plain - expected).norm() / expected.norm()) > 0.5


def test_alpha_may_differ_by_module(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_tiny("LlamaConfig", base)
    save_adapter(base, tmp_path / "one", alpha_pattern={"v_proj": 40, "layers.1.mlp.up_proj": 40})
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    found = read_adapter(tmp_path / "one")
    raw = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for module, scale in (
        ("model.layers.0.self_attn.v_proj", 10.0),
        ("model.layers.1.mlp.up_proj", 10.0),
        ("model.layers.0.mlp.up_proj", config["lora_alpha"] / 4),
    ):
        up = raw[f"base_model.model.{module}.lora_B.weight"]
        assert torch.equal(found[module].up, up * scale)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "adapters of the type IA3 are not supported"),
        ({"task_type": "SEQ_CLS"}, "for the task SEQ_CLS"),
        ({"use_dora": True}, "the adapter has DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules of its own"),
        ({"bias": "all"}, "changes biases"),
        ({"init_lora_weights": "pissa"}, "starts from pissa and changes its base's own weights"),
        ({"lora_alpha": "8"}, "lora_alpha is no usable number"),
        ({"lora_alpha": 10**400}, "lora_alpha is no usable number: 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha is no usable number: nan"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "names no module"),
        ({"alpha_pattern": ["v_proj"]}, "alpha_pattern is not a JSON object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_plain_lora_is_refused(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    save_tiny("LlamaConfig", tmp_path)
    save_adapter(tmp_path, tmp_path / "one", **change)
    with pytest.raises(ModelRefused, match=sentence) as refusal:
        read_adapter(tmp_path / "one")
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_nested_without_end_are_refused(tmp_path: Path, file: str) -> None:
    save_tiny("LlamaConfig", tmp_path)
    save_adapter(tmp_path, tmp_path / "one")
    nested = b"[" * 100_000
    length = struct.pack("<Q", len(nested)) if file.endswith("safetensors") else b""
    (tmp_path / "one" / file).write_bytes(length + nested)
    with pytest.raises(ModelRefused, match=f"{file} (is not JSON|cannot be read)"):
        read_adapter_footprint(tmp_path / "one", 4)


def spoiled(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "adapter_model.safetensors"
    tensors: dict[str, Any] = load_file(path) | {
        f"base_model.model.{name}": tensor for name, tensor in changes.items()
    }
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{Q}.lora_A.weight": None}, f"only one of two factors for {Q}"),
        ({f"{Q}.lora_A.weight": torch.zeros(5, 64)}, r"do not fit: \[5, 64\], \[64, 4\]"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(64)}, "no plain LoRA has: .*magnitude_vector"),
        (
            {f"{Q}.lora_A.weight": torch.zeros(4, 65)},
            rf"made for another base: its {Q} is \[64, 65\], the base has \[64, 64\]",
        ),
        (
            {
                "model.norm.lora_A.weight": torch.zeros(4, 64),
                "model.norm.lora_B.weight": torch.zeros(64, 4),
            },
            "changes model.norm, which is no projection of its base",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("family", ["LlamaConfig", "Gemma2Config"])
def test_what_does_not_fit_its_base_is_refused_and_the_base_goes_on(
    tmp_path: Path, family: str, changes: dict[str, Any], sentence: str
) -> None:
    save_tiny(family, tmp_path)
    save_adapter(tmp_path, tmp_path / "one")
    spoiled(tmp_path / "one", **changes)
    model, _ = load(tmp_path)
    driver = driver_of(model)
    with pytest.raises(ModelRefused, match=sentence):
        driver.engine.attach("one", read_adapter(tmp_path / "one"))
    driver.generate([asking("a", "base", PROMPTS[0])])
    assert driver.received["a", 0].token_ids == generated(tmp_path, PROMPTS[:1], NUM_TOKENS)[0]


def test_experts_that_see_some_tokens_only_take_no_adapter(tmp_path: Path) -> None:
    """Whose tokens an expert is given is not known there."""
    import transformers

    save_tiny("Gemma2Config", tmp_path)
    save_adapter(tmp_path, tmp_path / "one", targets=("up_proj",))
    model, _ = load(tmp_path)
    original = model._original  # type: ignore[attr-defined]  # to make an expert of a projection
    assert isinstance(original, transformers.PreTrainedModel)
    mlp = original.model.layers[1].mlp
    mlp_forward = mlp.forward
    mlp.forward = lambda x: torch.cat([mlp_forward(x[:, :4]), mlp_forward(x[:, 4:])], dim=1)
    with pytest.raises(ModelRefused, match=r"layers.1.mlp.up_proj, which does not see every token"):
        driver_of(model, one=tmp_path / "one")
