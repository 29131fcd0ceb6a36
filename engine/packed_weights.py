"""What a checkpoint's `quantization_config` says of its weights: packed how, and whether we can read it.

The engine computes with plain weights, so packed ones are unpacked while they are read. What could
only be guessed at is refused. Imports no torch: it is asked before anything is loaded.
"""

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ModelRefused

Method = Literal["awq", "gptq", "compressed-tensors", "fp8"]
NAMES: dict[Method, str] = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
}
PACKED_SUFFIXES = (".qweight", ".weight_packed")
"""Tensors of int32 that hold several weights each."""
COMPANION_SUFFIXES = (
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    "_scale_inv",
)
"""Tensors that tell how to unpack others."""
IGNORED_SUFFIXES = (
    ".input_scale",
    ".activation_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""Scales of activations and caches, which stay as precise as the worker computes."""
WORD_BITS = 32
PACKED_BITS: dict[Method, tuple[int, ...]] = {
    "awq": (4,),
    "gptq": (2, 4, 8),
    "compressed-tensors": (4, 8),
}
CT_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "naive-quantized": "",
}
"""Formats of compressed-tensors, and the numbers that they hold; empty: either."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """How the weights of a checkpoint are packed."""

    method: Method
    bits: int
    group_size: int = 0
    """Inputs that share a scale, where the config says it; 0: the scales' shape does."""
    block: tuple[int, int] = (0, 0)
    """(outputs, inputs) that share a scale; zeros: the scales' shape says it."""
    are_zeros_shifted: bool = False
    """GPTQ's first format stores each zero point less one."""

    def notice(self, dtype: str, size: str) -> str:
        """One sentence for the operator."""
        return f"{self.bits}-bit {NAMES[self.method]} weights are unpacked to {dtype}: {size}"

    def num_weights(self, name: str, num_elements: int) -> int:
        """How many weights the stored tensor `name` of so many elements stands for."""
        if name.endswith(PACKED_SUFFIXES):
            return num_elements * (WORD_BITS // self.bits)
        return 0 if name.endswith((*COMPANION_SUFFIXES, *IGNORED_SUFFIXES)) else num_elements


def read_packed_weights(config: dict[str, Any]) -> PackedWeights | None:
    """From a `config.json`; None where the weights are plain. Raises ModelRefused."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ModelRefused("its quantization_config is not a JSON object")
    method = found.get("quant_method")
    if method == "awq":
        return _awq(found)
    if method == "gptq":
        return _gptq(found)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "fp8":
        return _fp8(found)
    raise ModelRefused(
        f"checkpoints quantised by {method or 'an unnamed method'} are not supported:"
        f" take the original, or one by {', '.join(NAMES.values())}"
    )


def _awq(found: dict[str, Any]) -> PackedWeights:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelRefused(f"AWQ weights in the {version} layout are not supported, only gemm")
    return PackedWeights("awq", _bits("awq", found.get("bits", found.get("w_bit"))))


def _gptq(found: dict[str, Any]) -> PackedWeights:
    form = str(found.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2") or found.get("is_marlin_format"):
        form = "marlin" if found.get("is_marlin_format") else form
        raise ModelRefused(f"GPTQ weights in the {form} format are not supported, only gptq")
    group_size = found.get("group_size", -1)
    if not isinstance(group_size, int):
        raise ModelRefused(f"GPTQ weights in groups of {group_size!r} are not supported")
    bits = _bits("gptq", found.get("bits"))
    return PackedWeights("gptq", bits, max(0, group_size), are_zeros_shifted=form == "gptq")


def _compressed_tensors(found: dict[str, Any]) -> PackedWeights:
    groups = [group for group in _values(found.get("config_groups")) if isinstance(group, dict)]
    forms = {str(group.get("format") or found.get("format")) for group in groups}
    kinds = {_bits_and_type(group.get("weights")) for group in groups}
    if len(forms) != 1 or len(kinds) != 1:
        raise ModelRefused("compressed-tensors weights of several kinds are not supported")
    (form,), ((bits, kind),) = forms, kinds
    wanted = CT_FORMATS.get(form)
    sparsity = found.get("sparsity_config")
    is_sparse = bool(sparsity) and not (
        isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    )
    if wanted is None or wanted not in ("", kind) or is_sparse or found.get("transform_config"):
        what = "sparse" if is_sparse else "rotated" if wanted is not None else form
        raise ModelRefused(
            f"compressed-tensors weights that are {what} are not supported,"
            f" only {', '.join(CT_FORMATS)}"
        )
    if form != "pack-quantized" and bits != 8:
        raise ModelRefused(f"compressed-tensors weights of {bits} bits are not supported in {form}")
    return PackedWeights("compressed-tensors", _bits("compressed-tensors", bits))


def _bits_and_type(weights: object) -> tuple[object, str]:
    if not isinstance(weights, dict):
        return None, ""
    bits = weights.get("num_bits")
    return bits if isinstance(bits, int) else str(bits), str(weights.get("type", "int"))


def _fp8(found: dict[str, Any]) -> PackedWeights:
    form = str(found.get("fmt", "e4m3"))
    block = found.get("weight_block_size") or (0, 0)
    is_pair = isinstance(block, list | tuple) and [type(size) for size in block] == [int, int]
    if form != "e4m3" or not is_pair or min(block) < 0:
        raise ModelRefused(f"fp8 weights in {form} with blocks of {block} are not supported")
    return PackedWeights("fp8", 8, block=(block[0], block[1]))


def _bits(method: Method, bits: object) -> int:
    known = PACKED_BITS[method]
    if isinstance(bits, int) and bits in known:
        return bits
    raise ModelRefused(
        f"{NAMES[method]} weights of {bits!r} bits are not supported,"
        f" only of {' or '.join(map(str, known))}"
    )


def _values(groups: object) -> list[object]:
    return list(groups.values()) if isinstance(groups, dict) else []
