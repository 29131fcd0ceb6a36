"""LoRA adapters as PEFT saves them, and their bases merged by the formula: the oracle of ours."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    base: Path,
    directory: Path,
    *,
    targets: Sequence[str] = PROJECTIONS,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 1,
    **config: object,
) -> None:
    """An adapter over every projection of `base` whose name is in `targets`."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in targets:
            continue
        out_features, in_features = weight.shape
        prefix = f"base_model.model.{module}."
        for part, shape in (("lora_A", (rank, in_features)), ("lora_B", (out_features, rank))):
            tensors[f"{prefix}{part}.weight"] = 0.15 * torch.randn(*shape, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(facts | config))


def merge(base: Path, adapter: Path, directory: Path) -> Path:
    """A checkpoint with W + s B A in the place of each W."""
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("calibration"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = factors[name], factors[name.replace("lora_A", "lora_B")]
        alpha = config.get("alpha_pattern", {}).get(module.rsplit(".", 1)[-1], config["lora_alpha"])
        rank = len(down)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (up @ down)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
