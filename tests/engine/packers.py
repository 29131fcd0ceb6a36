"""Packs weights as other tools do, element by element in numpy: the oracle of our unpacking.

Each packer takes a weight [out, in] and gives (tensors by suffix, the weight that they stand for).
Written from the formats' descriptions; shares no code with what it checks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Weight = NDArray[np.float32]
Parts = dict[str, torch.Tensor]
Packer = Callable[[Weight], tuple[Parts, Weight]]


def e4m3_table() -> Weight:
    """The value of each byte: sign, four bits of exponent with bias 7, three of mantissa."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        size = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        values.append(np.nan if code & 127 == 127 else -size if sign else size)
    return np.array(values, dtype=np.float32)


def words(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Each row's numbers, the first in the lowest bits, `32 / bits` to a word."""
    per_word = 32 // bits
    packed = []
    for row in rows:
        padded = row + [0] * (-len(row) % per_word)
        packed.append(
            [
                sum(
                    number << (bits * place)
                    for place, number in enumerate(padded[at : at + per_word])
                )
                for at in range(0, len(padded), per_word)
            ]
        )
    return torch.from_numpy(np.array(packed, dtype=np.uint32).view(np.int32))


def asymmetric(
    weight: Weight, groups: list[int], bits: int
) -> tuple[list[list[int]], list[list[int]], Weight, Weight]:
    """(numbers [out][in], zeros [out][group], fp16 scales [out, group], the rounded weight)"""
    num_groups = max(groups) + 1
    numbers = [[0] * len(row) for row in weight]
    zeros = [[0] * num_groups for _ in weight]
    scales = np.zeros((len(weight), num_groups), dtype=np.float32)
    rounded = np.zeros_like(weight)
    for out, row in enumerate(weight):
        for group in range(num_groups):
            members = [index for index, own in enumerate(groups) if own == group]
            low, high = min(0.0, row[members].min()), max(0.0, row[members].max())
            scale = np.float32(np.float16((high - low) / (2**bits - 1)))
            zero = int(np.clip(round(-low / scale), 0, 2**bits - 1))
            zeros[out][group], scales[out, group] = zero, scale
            for index in members:
                number = int(np.clip(round(row[index] / scale) + zero, 0, 2**bits - 1))
                numbers[out][index] = number
                rounded[out, index] = np.float32(number - zero) * scale
    return numbers, zeros, scales, rounded


def turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def half(scales: Weight) -> torch.Tensor:
    return torch.from_numpy(scales.astype(np.float16))


def awq(group: int = 32) -> Packer:
    """Eight outputs to a word: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up."""

    def shuffled(rows: list[list[int]]) -> list[list[int]]:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return [[row[at + o] for at in range(0, len(row), 8) for o in order] for row in rows]

    def pack(weight: Weight) -> tuple[Parts, Weight]:
        groups = [index // group for index in range(weight.shape[1])]
        numbers, zeros, scales, rounded = asymmetric(weight, groups, 4)
        return {
            "qweight": words(shuffled(turned(numbers)), 4),
            "qzeros": words(shuffled(turned(zeros)), 4),
            "scales": half(scales.T.copy()),
        }, rounded

    return pack


def gptq(
    bits: int, group: int, *, is_v1: bool, in_order: bool, stores_order: bool = True
) -> Packer:
    """Inputs packed; zeros less one in the first format; groups by g_idx."""

    def pack(weight: Weight) -> tuple[Parts, Weight]:
        groups = [index // group for index in range(weight.shape[1])]
        if not in_order:
            np.random.default_rng(3).shuffle(groups)
        numbers, zeros, scales, rounded = asymmetric(weight, groups, bits)
        stored = [[(zero - is_v1) % 2**bits for zero in row] for row in turned(zeros)]
        parts = {
            "qweight": words(numbers, bits).T.contiguous(),
            "qzeros": words(stored, bits),
            "scales": half(scales.T.copy()),
            "g_idx": torch.tensor(groups, dtype=torch.int32),
        }
        if not stores_order:
            del parts["g_idx"]
        return parts, rounded

    return pack


def compressed(bits: int, group: int, *, has_zeros: bool, in_order: bool = True) -> Packer:
    """Inputs packed, offset by half the range; zeros packed along the outputs."""

    def pack(weight: Weight) -> tuple[Parts, Weight]:
        half_range, size = 2 ** (bits - 1), group or weight.shape[1]
        groups = [index // size for index in range(weight.shape[1])]
        if not in_order:
            np.random.default_rng(4).shuffle(groups)
        numbers, zeros, scales, rounded = asymmetric(weight, groups, bits)
        if not has_zeros:  # symmetric: the middle of the range is zero
            numbers = [
                [number - zeros[o][groups[i]] + half_range for i, number in enumerate(row)]
                for o, row in enumerate(numbers)
            ]
            numbers = [[min(max(number, 0), 2**bits - 1) for number in row] for row in numbers]
            zeros = [[half_range] * len(row) for row in zeros]
            for o, row in enumerate(numbers):
                for i, number in enumerate(row):
                    rounded[o, i] = np.float32(number - half_range) * scales[o, groups[i]]
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": half(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            parts["weight_zero_point"] = words(turned(zeros), bits).T.contiguous()
        if not in_order:
            parts["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return parts, rounded

    return pack


def bytes_of(kind: str, block: tuple[int, int], suffix: str = "weight_scale") -> Packer:
    """A byte for each weight, int8 or fp8, and a scale for each block; (0, 0): one for all."""
    table = e4m3_table()
    largest = 448.0 if kind == "fp8" else 127.0

    def pack(weight: Weight) -> tuple[Parts, Weight]:
        height, width = (size or full for size, full in zip(block, weight.shape, strict=True))
        codes = np.zeros(weight.shape, dtype=np.uint8 if kind == "fp8" else np.int8)
        rounded = np.zeros_like(weight)
        scales = np.zeros((-(-weight.shape[0] // height), -(-weight.shape[1] // width)), np.float32)
        for o, i in np.ndindex(*scales.shape):
            place = np.s_[o * height : (o + 1) * height, i * width : (i + 1) * width]
            scale = np.float32(np.abs(weight[place]).max() / largest)
            scales[o, i] = scale
            wanted = weight[place] / scale
            if kind == "fp8":
                chosen = np.nanargmin(np.abs(table - wanted[..., None]), axis=-1)
                codes[place], rounded[place] = chosen, table[chosen] * scale
            else:
                codes[place] = np.rint(wanted)
                rounded[place] = codes[place].astype(np.float32) * scale
        stored = torch.from_numpy(codes)
        stored = stored.view(torch.float8_e4m3fn) if kind == "fp8" else stored
        parts_scale = torch.from_numpy(scales if block != (0, 0) else scales.reshape(1))
        return {"weight": stored, suffix: parts_scale}, rounded

    return pack


def compressed_config(form: str, bits: object, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
