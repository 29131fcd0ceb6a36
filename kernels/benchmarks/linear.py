"""The linear layers of SmolLM2-135M, held against the larger of their traffic and arithmetic.

python -m kernels.benchmarks.linear [--device cuda] [--dtype bf16]
"""

from __future__ import annotations

import torch

from kernels.benchmarks.launches import LinearLaunch
from kernels.benchmarks.limits import Setting, open_setting
from kernels.linear import PackedLinear, linear

SHAPES = {
    "qkv": (960, 576),
    "out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
NUM_TOKENS = (1, 16, 64, 256)


def measure(setting: Setting, name: str, num_tokens: int) -> None:
    """One layer; small weights come from the caches, so a fraction may exceed 100 %."""
    out_features, in_features = SHAPES[name]
    weight = torch.randn(out_features, in_features, device=setting.device).to(setting.dtype)
    packed = PackedLinear(weight)
    x = torch.randn(num_tokens, in_features, device=setting.device).to(setting.dtype)
    setting.report(
        f"{name} {num_tokens} x {in_features} -> {out_features}",
        lambda: linear(x, packed),
        LinearLaunch.of(x, weight),
    )


def measure_all(setting: Setting) -> None:
    """Every layer, with few rows and many."""
    for layer in SHAPES:
        for num_tokens in NUM_TOKENS:
            measure(setting, layer, num_tokens)


if __name__ == "__main__":
    measure_all(open_setting(__doc__))
