"""Checkpoints that other tools have packed compute what their unpacked weights do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.memory.footprint import read_footprint
from engine.models.checkpoint import Checkpoint
from engine.settings import EngineSettings
from engine.worker.loading import LoadedEngine, load_engine
from infra.local import inspection
from tests.engine import packers
from tests.engine.driver import Driver, request
from tests.engine.packers import Packer, compressed_config
from tests.engine.tiny import generated, save_tiny

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}
PACKED = "pack-quantized"
FORMATS: dict[str, tuple[Packer, dict[str, Any], str]] = {
    "awq": (packers.awq(), AWQ, "4-bit AWQ"),
    "gptq": (packers.gptq(4, 32, is_v1=True, in_order=False), GPTQ, "4-bit GPTQ"),
    "gptq_v2": (
        packers.gptq(8, 16, is_v1=False, in_order=True, stores_order=False),
        GPTQ | {"bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
        "8-bit GPTQ",
    ),
    "w4a16": (
        packers.compressed(4, 16, has_zeros=False),
        compressed_config(PACKED, 4),
        "4-bit compressed-tensors",
    ),
    "w4a16_zeros_and_order": (
        packers.compressed(4, 32, has_zeros=True, in_order=False),
        compressed_config(PACKED, 4),
        "4-bit compressed-tensors",
    ),
    "w8a16_by_channel": (
        packers.compressed(8, 0, has_zeros=True),
        compressed_config(PACKED, 8),
        "8-bit compressed-tensors",
    ),
    "w8a8_int": (
        packers.bytes_of("int8", (1, 0)),
        compressed_config("int-quantized", 8),
        "8-bit compressed-tensors",
    ),
    "w8a8_fp8_one_scale": (
        packers.bytes_of("fp8", (0, 0)),
        compressed_config("float-quantized", 8, "float"),
        "8-bit compressed-tensors",
    ),
    "fp8_blocks": (packers.bytes_of("fp8", (48, 40), "weight_scale_inv"), FP8, "8-bit fp8"),
}
PROMPTS = [[7, 31, 5, 90, 12, 44], [100, 3]]


def pack(
    directory: Path, target: Path, plain: Path, packer: Packer, config: dict[str, Any]
) -> None:
    """`target`: the model of `directory` with its projections packed; `plain`: what that stands for."""
    stored: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = rounded[name] = tensor
        if "_proj.weight" in name:
            parts, weight = packer(tensor.numpy())
            del stored[name]
            prefix = name.removesuffix("weight")
            stored |= {prefix + suffix: part for suffix, part in parts.items()}
            rounded[name] = torch.from_numpy(weight)
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)  # of a cache in fp8
    for folder, tensors in ((target, stored), (plain, rounded)):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for file in ("config.json", "tokenizer.json"):
            (folder / file).write_bytes((directory / file).read_bytes())
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def load(directory: Path) -> LoadedEngine:
    settings = EngineSettings(
        device="cpu",
        dtype="fp32",
        num_threads=1,
        kv_cache_mib=16,
        calibration_cache=directory / "calibration",
    )
    return load_engine(directory, settings)


def assert_generates_like(directory: Path, plain: Path) -> LoadedEngine:
    loaded = load(directory)
    requests = [request(str(index), prompt, 12) for index, prompt in enumerate(PROMPTS)]
    found = Driver(loaded.engine).generate(requests)
    assert found == generated(plain, PROMPTS, 12)
    return loaded


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_generate_what_the_unpacked_ones_do(tmp_path: Path, name: str) -> None:
    packer, config, said = FORMATS[name]
    (tmp_path / "original").mkdir()
    save_tiny("LlamaConfig", tmp_path / "original")
    pack(tmp_path / "original", tmp_path / "packed", tmp_path / "plain", packer, config)
    loaded = assert_generates_like(tmp_path / "packed", tmp_path / "plain")
    assert loaded.report.tier == "fused"
    assert f"{said} weights are unpacked to fp32: 534 KB" in str(loaded.report)
    plain = read_footprint(tmp_path / "plain", 4)
    assert read_footprint(tmp_path / "packed", 4).weight_bytes == plain.weight_bytes
    assert (
        f"{said} weights are unpacked to fp32"
        in inspection.inspect(tmp_path / "packed", "mit", []).fit
    )


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("Gemma2Config", "awq", {"query_pre_attn_scalar": 16}),
        (
            "Qwen3MoeConfig",
            "fp8_blocks",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        ),
    ],
)
def test_the_other_tiers_get_them_unpacked_as_well(
    tmp_path: Path, family: str, name: str, changes: dict[str, Any]
) -> None:
    packer, config, said = FORMATS[name]
    (tmp_path / "original").mkdir()
    save_tiny(family, tmp_path / "original", **changes)
    pack(tmp_path / "original", tmp_path / "packed", tmp_path / "plain", packer, config)
    loaded = assert_generates_like(tmp_path / "packed", tmp_path / "plain")
    assert loaded.report.tier == "attention hook"
    assert f"{said} weights are unpacked" in str(loaded.report)


def test_stacked_experts_have_scales_for_each_of_them(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).normal(size=(3, 48, 80)).astype(np.float32)
    packed = [packers.bytes_of("fp8", (48, 40))(weight) for weight in weights]
    tensors = {
        "experts.up": torch.stack([parts["weight"] for parts, _ in packed]),
        "experts.up_scale_inv": torch.stack([parts["weight_scale"] for parts, _ in packed]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    found = Checkpoint(tmp_path).tensor("experts.up", (3, 48, 80), torch.float32)
    assert np.array_equal(found.numpy(), np.stack([weight for _, weight in packed]))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes are not supported: take"),
        ({"bits": 4}, "quantised by an unnamed method"),
        (AWQ | {"version": "gemv"}, "AWQ weights in the gemv layout"),
        (AWQ | {"bits": 3}, "AWQ weights of 3 bits are not supported, only of 4"),
        (GPTQ | {"bits": 3}, "GPTQ weights of 3 bits are not supported, only of 2 or 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the marlin format"),
        (FP8 | {"fmt": "e5m2"}, "fp8 weights in e5m2"),
        (compressed_config("nvfp4-pack-quantized", 4, "float"), "nvfp4-pack-quantized"),
        (compressed_config(PACKED, 3), "compressed-tensors weights of 3 bits"),
        (compressed_config(PACKED, 4) | {"transform_config": {"a": 1}}, "are rotated"),
        (compressed_config(PACKED, 4) | {"sparsity_config": {"format": "2:4"}}, "are sparse"),
        (compressed_config("int-quantized", 4), "of 4 bits are not supported in int-quantized"),
        (compressed_config(PACKED, [4]), r"weights of '\[4\]' bits are not supported"),
        (compressed_config(PACKED, 4) | {"sparsity_config": "2:4"}, "are sparse"),
        (AWQ | {"bits": "4"}, "AWQ weights of '4' bits"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "of several kinds"),
        (["int4"], "quantization_config is not a JSON object"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_unpacked_is_refused_before_loading(
    tmp_path: Path, config: Any, sentence: str
) -> None:
    save_tiny("LlamaConfig", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    for attempt in (lambda: load(tmp_path), lambda: inspection.inspect(tmp_path, "mit", [])):
        with pytest.raises(ModelRefused, match=sentence) as refusal:
            attempt()
        assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("name", "spoiled", "sentence"),
    [
        ("awq", {"scales": torch.ones(3, 64)}, "q_proj.weight: AWQ weights"),
        ("awq", {"scales": None}, "of its AWQ tensors only qweight, qzeros are there"),
        ("gptq", {"g_idx": torch.full((64,), 9)}, "q_proj.weight: GPTQ weights .* 10 groups"),
        ("w4a16", {"weight_shape": torch.tensor([64, 65])}, r"are said to be \[64, 65\]"),
        ("w4a16", {"weight_scale": torch.ones(64, 5)}, "do not fit scales"),
        ("w4a16", {"weight_scale": torch.ones(64, 0)}, "q_proj.weight cannot be unpacked"),
        ("fp8_blocks", {"weight_scale_inv": torch.ones(3, 2)}, "do not fit scales"),
        ("fp8_blocks", {"weight_scale_inv": None}, "q_proj.weight .*float8.* has no scale"),
        ("fp8_blocks", {"weight": torch.ones(64, 64)}, "are said to have scales"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, spoiled: dict[str, Any], sentence: str
) -> None:
    packer, config, _ = FORMATS[name]
    (tmp_path / "original").mkdir()
    save_tiny("LlamaConfig", tmp_path / "original", num_hidden_layers=1)
    pack(tmp_path / "original", tmp_path / "packed", tmp_path / "plain", packer, config)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    for suffix, tensor in spoiled.items():
        key = f"model.layers.0.self_attn.q_proj.{suffix}"
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, path)
    with pytest.raises(ModelRefused, match=sentence):
        load(tmp_path / "packed")
