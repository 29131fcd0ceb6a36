"""The served checkpoint in the int8 form that vLLM reads: so that int8 can be compared with int8.

Weights of every linear layer but the head are rounded to int8 with a scale for each output row;
activations are rounded token by token while it computes (W8A8, the `compressed-tensors` format).
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def int8_checkpoint(model: Path, target: Path) -> Path:
    """Write `target` from the checkpoint `model` when it is missing; it appears by one rename."""
    if target.exists():
        return target
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors |= _quantised(name, tensor)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    return partial.rename(target)


def _quantised(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: tensor.to(torch.bfloat16)}
    scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127  # [out, 1]
    rounded = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)  # [out, in]
    return {name: rounded, name.removesuffix("weight") + "weight_scale": scale}
