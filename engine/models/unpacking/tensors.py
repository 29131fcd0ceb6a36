"""Which stored tensors make up which weight, by their names."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.errors import ModelRefused
from engine.models.unpacking import awq, compressed_tensors, gptq, scaled
from engine.packed_weights import IGNORED_SUFFIXES, PackedWeights

Unpack = Callable[[Mapping[str, torch.Tensor], PackedWeights], torch.Tensor]
AWQ_PARTS: tuple[str, ...] = ("qzeros", "scales")
GPTQ_PARTS: tuple[str, ...] = ("qzeros", "scales", "g_idx")
CT_PARTS: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
SCALES = ("_scale_inv", "_scale")
ZERO_POINT = "_zero_point"


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One weight as it is stored."""

    name: str
    sources: Mapping[str, str]
    """The tensors that it is made of, by their part in it."""
    packed: PackedWeights
    unpack: Unpack

    def read(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The weight in fp32; `tensor` reads a stored one. Raises ModelRefused."""
        try:
            parts = {part: tensor(source) for part, source in self.sources.items()}
            return self.unpack(parts, self.packed)
        except ModelRefused as refusal:
            raise ModelRefused(f"{self.name}: {refusal.message}", tensor=self.name) from refusal
        except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError) as fault:
            raise ModelRefused(f"{self.name} cannot be unpacked: {fault}") from fault


def packed_tensors(stored: Iterable[str], packed: PackedWeights) -> dict[str, PackedTensor]:
    """The weights that are packed, by the names that a plain checkpoint would give them."""
    names = set(stored)
    found = (_packed(name, names, packed) for name in sorted(names))
    return {each.name: each for each in found if each is not None}


def is_companion(name: str) -> bool:
    """Whether a tensor that belongs to no weight is one of those that are not needed here."""
    return name.endswith(IGNORED_SUFFIXES)


def _packed(name: str, names: set[str], packed: PackedWeights) -> PackedTensor | None:
    prefix, _, last = name.rpartition(".")
    if last == "qweight":
        is_awq = packed.method == "awq"
        parts = AWQ_PARTS if is_awq else GPTQ_PARTS
        unpack = awq.unpack if is_awq else gptq.unpack
    elif last == "weight_packed":
        parts, unpack = CT_PARTS, compressed_tensors.unpack
    else:
        return _scaled(name, names, packed)
    sources = {last: name} | {part: f"{prefix}.{part}" for part in parts}
    there = {part: source for part, source in sources.items() if source in names}
    return PackedTensor(f"{prefix}.weight", there, packed, unpack)


def _scaled(name: str, names: set[str], packed: PackedWeights) -> PackedTensor | None:
    scale = next((name + suffix for suffix in SCALES if name + suffix in names), None)
    if scale is None:
        return None
    sources = {"weight": name, "scale": scale}
    if name + ZERO_POINT in names:
        sources["zero_point"] = name + ZERO_POINT
    return PackedTensor(name, sources, packed, scaled.unpack)
