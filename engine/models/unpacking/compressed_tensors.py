"""compressed-tensors, `pack-quantized`: signed integers packed along the inputs, offset to unsigned.

    W[o, i] = (q[o, i] - z[o, g(i)]) * s[o, g(i)],    q = word's value - 2^(bits - 1)

    weight_packed  [out, in * bits / 32] int32      weight_shape  [2]: out, in
    weight_scale   [out, groups]                    weight_zero_point  [out * bits / 32, groups]
                                                    int32, packed like q, or none: z = 0
    weight_g_idx   [in] int32: g(i); without it i // (in / groups)

Source: the compressed-tensors library, `PackedQuantizationCompressor`.
"""

from collections.abc import Mapping

import torch

from engine.errors import ModelRefused
from engine.models.unpacking.words import unpack_words
from engine.packed_weights import PackedWeights


def unpack(parts: Mapping[str, torch.Tensor], packed: PackedWeights) -> torch.Tensor:
    """The weight: [out, in], fp32. Raises ModelRefused where the shapes do not fit together."""
    if not {"weight_packed", "weight_scale", "weight_shape"} <= parts.keys():
        raise ModelRefused(f"of its packed tensors only {', '.join(sorted(parts))} are there")
    scales = parts["weight_scale"].float()
    shape = parts["weight_shape"].tolist()
    stored = unpack_words(parts["weight_packed"], packed.bits, dim=1)
    if len(shape) != 2 or shape[0] != len(stored) or not 0 < shape[1] <= stored.shape[1]:
        raise ModelRefused(f"packed weights {list(stored.shape)} are said to be {shape}")
    num_outputs, num_inputs = shape
    offset = 1 << (packed.bits - 1)
    weights = stored[:, :num_inputs].float() - offset
    if scales.dim() != 2 or len(scales) != num_outputs or num_inputs % scales.shape[1]:
        raise ModelRefused(f"packed weights {shape} do not fit scales {list(scales.shape)}")
    groups = _groups(parts.get("weight_g_idx"), num_inputs, scales.shape[1])
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        return weights * scales[:, groups]
    plain_zeros = unpack_words(zeros, packed.bits, dim=0)[:num_outputs].float() - offset
    if plain_zeros.shape != scales.shape:
        raise ModelRefused(f"packed weights {shape} do not fit zeros {list(plain_zeros.shape)}")
    return (weights - plain_zeros[:, groups]) * scales[:, groups]


def _groups(stored: torch.Tensor | None, num_inputs: int, num_groups: int) -> torch.Tensor:
    """[in]: the group of each input."""
    plain = torch.arange(num_inputs) // (num_inputs // num_groups)
    if stored is None or bool((stored < 0).all()):  # -1: written before it was known
        return plain
    if len(stored) != num_inputs or not 0 <= int(stored.min()) <= int(stored.max()) < num_groups:
        raise ModelRefused(
            f"weight_g_idx does not name {num_groups} groups for {num_inputs} inputs"
        )
    return stored.long()
