"""GPTQ: input channels packed into words, groups of them with a scale and a zero point.

    W[o, i] = (q[i, o] - z[g(i), o]) * s[g(i), o]

    qweight  [in * bits / 32, out] int32      qzeros  [groups, out * bits / 32] int32
    scales   [groups, out]                    g_idx   [in] int32: g(i); without it i // group

With `desc_act` the groups are not neighbours, and only g_idx tells them. The first format stores
z - 1 (mod 2^bits), `gptq_v2` stores z.

Source: GPTQ, arXiv 2210.17323; AutoGPTQ's `QuantLinear.pack`.
"""

from collections.abc import Mapping

import torch

from engine.errors import ModelRefused
from engine.models.unpacking.words import unpack_words
from engine.packed_weights import PackedWeights


def unpack(parts: Mapping[str, torch.Tensor], packed: PackedWeights) -> torch.Tensor:
    """The weight: [out, in], fp32. Raises ModelRefused where the shapes do not fit together."""
    if not {"qweight", "qzeros", "scales"} <= parts.keys():
        raise ModelRefused(f"of its GPTQ tensors only {', '.join(sorted(parts))} are there")
    weights = unpack_words(parts["qweight"], packed.bits, dim=0)  # [in, out]
    zeros = unpack_words(parts["qzeros"], packed.bits, dim=1).int()  # [groups, out]
    if packed.are_zeros_shifted:
        zeros = (zeros + 1) & ((1 << packed.bits) - 1)
    scales = parts["scales"].float()
    groups = _groups(parts.get("g_idx"), len(weights), len(scales), packed.group_size)
    fits = zeros.shape == scales.shape and scales.shape[1:] == weights.shape[1:]
    if not fits or not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
        raise ModelRefused(
            f"GPTQ weights {list(weights.shape)} do not fit zeros {list(zeros.shape)},"
            f" scales {list(scales.shape)} and {int(groups.max()) + 1} groups"
        )
    plain = (weights.float() - zeros.float()[groups]) * scales[groups]
    return plain.T.contiguous()


def _groups(
    stored: torch.Tensor | None, num_inputs: int, num_groups: int, group_size: int
) -> torch.Tensor:
    """[in]: the group of each input."""
    if stored is not None and len(stored) == num_inputs:
        return stored.long()
    size = group_size or -(-num_inputs // num_groups)
    return torch.arange(num_inputs) // size
