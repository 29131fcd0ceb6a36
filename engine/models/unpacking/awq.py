"""AWQ, the GEMM layout: 4-bit weights, eight output channels to a word in an order of their own.

    W[o, i] = (q[i, o] - z[g(i), o]) * s[g(i), o],    g(i) = i // group

    qweight  [in, out / 8] int32      qzeros  [in / group, out / 8] int32
    scales   [in / group, out]

The j-th four bits of a word belong to its output channel ORDER[j].

Source: AWQ, arXiv 2306.00978; AutoAWQ's `WQLinear_GEMM.from_linear`.
"""

from collections.abc import Mapping

import torch

from engine.errors import ModelRefused
from engine.models.unpacking.words import unpack_words
from engine.packed_weights import PackedWeights

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(parts: Mapping[str, torch.Tensor], packed: PackedWeights) -> torch.Tensor:
    """The weight: [out, in], fp32. Raises ModelRefused where the shapes do not fit together."""
    assert packed.bits == BITS
    if not {"qweight", "qzeros", "scales"} <= parts.keys():
        raise ModelRefused(f"of its AWQ tensors only {', '.join(sorted(parts))} are there")
    weights, zeros = (_in_order(parts[name]) for name in ("qweight", "qzeros"))
    scales = parts["scales"].float()
    (num_inputs, num_outputs), num_groups = weights.shape, len(scales)
    if zeros.shape != scales.shape or scales.shape[1:] != (num_outputs,) or num_inputs % num_groups:
        raise ModelRefused(
            f"AWQ weights [{num_inputs}, {num_outputs}] do not fit zeros {list(zeros.shape)}"
            f" and scales {list(scales.shape)}"
        )
    grouped = weights.view(num_groups, -1, num_outputs).float()
    plain = (grouped - zeros[:, None].float()) * scales[:, None]
    return plain.view(num_inputs, num_outputs).T.contiguous()


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] int32 -> [n, out]"""
    stored = unpack_words(words, BITS, dim=1).view(len(words), -1, len(ORDER))
    ordered = torch.empty_like(stored)
    ordered[..., list(ORDER)] = stored
    return ordered.flatten(1)
