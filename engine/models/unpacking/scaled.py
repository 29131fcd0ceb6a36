"""Weights of a byte each, int8 or fp8 (e4m3), and scales for blocks of them.

    W[o, i] = (w[o, i] - z[block(o, i)]) * s[block(o, i)]

One scale for all, one for each output, one for each group of inputs, or one for each block of 128 x
128: the shape of the scales says which. `fp8` checkpoints (DeepSeek, Qwen) call them `_scale_inv`,
compressed-tensors calls them `weight_scale`; both multiply. What leads the last two dimensions, as
in stacked experts, is the same in weights and scales.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3; the compressed-tensors library.
"""

from collections.abc import Mapping

import torch

from engine.errors import ModelRefused
from engine.packed_weights import PackedWeights

DTYPES = (torch.int8, torch.float8_e4m3fn)


def unpack(parts: Mapping[str, torch.Tensor], packed: PackedWeights) -> torch.Tensor:
    """The weight: [..., out, in], fp32. Raises ModelRefused where the shapes do not fit together."""
    weight = parts["weight"]
    if weight.dtype not in DTYPES:
        raise ModelRefused(f"weights in {weight.dtype} are said to have scales")
    plain = weight.float()
    zeros = parts.get("zero_point")
    if zeros is not None:
        plain = plain - _spread(zeros.float(), plain.shape, packed.block)
    return plain * _spread(parts["scale"].float(), plain.shape, packed.block)


def _spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Scales that multiply a tensor of `shape` element by element."""
    if scales.numel() == 1:
        return scales.flatten()[0]
    if scales.dim() == 1 and len(scales) == shape[-2]:
        scales = scales[:, None]
    if scales.dim() != len(shape) or scales.shape[:-2] != shape[:-2]:
        raise ModelRefused(f"weights {list(shape)} do not fit scales {list(scales.shape)}")
    for dim, size in ((-2, block[0]), (-1, block[1])):
        count, wanted = scales.shape[dim], shape[dim]
        if count in (1, wanted):
            continue
        repeats = size or wanted // count
        if count * repeats < wanted or (count - 1) * repeats >= wanted:
            raise ModelRefused(f"weights {list(shape)} do not fit scales {list(scales.shape)}")
        scales = scales.repeat_interleave(repeats, dim=dim).narrow(dim, 0, wanted)
    return scales
