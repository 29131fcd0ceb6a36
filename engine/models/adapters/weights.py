"""Reads a PEFT adapter: for each projection the two factors of what it adds.

    y = W x + s B A x,    A: [rank, in], B: [out, rank], s = alpha / rank

Source: LoRA, arXiv 2106.09685; rank-stabilised scaling, arXiv 2312.03732.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.adapter_config import ADAPTER_WEIGHTS, AdapterConfig, read_adapter_config
from engine.errors import ModelRefused

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection. The scale is in `up`."""

    down: torch.Tensor
    """A: [rank, in], fp32"""
    up: torch.Tensor
    """s B: [out, rank], fp32"""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the projection that it belongs to."""
        return len(self.up), self.down.shape[1]


Adapter = Mapping[str, LowRank]
"""By the path of the module, as the base model of transformers names it."""


def read_adapter(directory: Path) -> Adapter:
    """The adapter in `directory`. Raises ModelRefused with one clear sentence."""
    config = read_adapter_config(directory)
    try:
        tensors = load_file(directory / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError) as fault:
        raise ModelRefused(f"{ADAPTER_WEIGHTS} cannot be read: {fault}") from fault
    modules: dict[str, LowRank] = {}
    for name in sorted(tensors):
        if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)):
            raise ModelRefused(f"the adapter has a tensor that no plain LoRA has: {name}")
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        if module not in modules:
            modules[module] = _low_rank(module, tensors, config)
    if not modules:
        raise ModelRefused("the adapter is empty")
    return modules


def _low_rank(module: str, tensors: dict[str, torch.Tensor], config: AdapterConfig) -> LowRank:
    down, up = (tensors.get(f"{PREFIX}{module}{end}") for end in (DOWN, UP))
    if down is None or up is None:
        raise ModelRefused(f"the adapter has only one of two factors for {module}")
    is_pair = down.dim() == up.dim() == 2 and down.shape[0] == up.shape[1] > 0
    if not is_pair or not down.is_floating_point() or not up.is_floating_point():
        raise ModelRefused(
            f"the adapter's factors for {module} do not fit: {list(down.shape)}, {list(up.shape)}"
        )
    return LowRank(down.float(), up.float() * config.scale(module, len(down)))


def refuse_misfit(module: str, low_rank: LowRank, shape: tuple[int, int] | None) -> None:
    """Raise ModelRefused unless the base has a projection (out, in) of this shape there."""
    if shape is None:
        raise ModelRefused(f"the adapter changes {module}, which is no projection of its base")
    if low_rank.shape != shape:
        raise ModelRefused(
            f"the adapter was made for another base: its {module} is {list(low_rank.shape)},"
            f" the base has {list(shape)}"
        )
