"""What a checkpoint will take of a machine's memory, read from its files. Imports no torch.

Known before anything is loaded: whether it fits, and how many requests of which length fit beside it.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.adapter_config import ADAPTER_WEIGHTS, read_adapter_config
from engine.context import context_length
from engine.errors import ModelRefused
from engine.packed_weights import PackedWeights, read_packed_weights
from engine.pooling import read_pooling

FP32_BYTES = 4
"""Models that pool are computed in it."""
KILO = 1000
HEADER_BYTES_MAX = 100_000_000
"""safetensors' own limit."""
UNREADABLE = (
    OSError,
    ValueError,
    RecursionError,
    struct.error,
    KeyError,
    TypeError,
    AttributeError,
)
"""What a header of foreign hands may raise."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_heads")
ATTENTION_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model at a given precision."""

    num_parameters: int
    context_length: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Of the KV cache over all layers; for recurrent and compressed caches it is an upper bound."""
    packed: PackedWeights | None = None
    """How the files hold the weights, which are counted as they will be loaded: unpacked."""

    def unpacked_notice(self, dtype: str) -> str:
        """One sentence on packed weights; empty where they are plain."""
        if self.packed is None:
            return ""
        return self.packed.notice(dtype, told_bytes(self.weight_bytes))

    def num_requests(self, pool_bytes: int, num_tokens: int) -> int:
        """How many requests of `num_tokens` tokens each a KV cache of `pool_bytes` has room for."""
        return pool_bytes // max(1, self.kv_bytes_per_token * num_tokens)

    @property
    def context_bytes(self) -> int:
        """The KV cache of one request that uses the whole context."""
        return self.kv_bytes_per_token * self.context_length


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the headers of a checkpoint's safetensors say."""

    file_bytes: Mapping[str, int]
    num_elements: Mapping[str, int]
    """By the name of the tensor."""


def stored_weights(directory: Path) -> StoredWeights:
    """Of the files in `directory`. Raises ModelRefused when one cannot be read."""
    paths = sorted(directory.glob("*.safetensors"))
    elements: dict[str, int] = {}
    for path in paths:
        elements |= _num_elements(path)
    return StoredWeights({path.name: path.stat().st_size for path in paths}, elements)


def read_footprint(
    directory: Path,
    bytes_per_element: int,
    stored: StoredWeights | None = None,
    *,
    bytes_per_kv_element: int | None = None,
) -> Footprint:
    """The footprint of the checkpoint in `directory`. Raises ModelRefused when it cannot be read.

    `stored`: what is known of weights that are not there yet. `bytes_per_kv_element` where the KV
    cache has another precision than the weights.
    """
    config = _read_config(directory)
    packed = read_packed_weights(config)
    elements = (stored or stored_weights(directory)).num_elements
    num_parameters = sum(
        size if packed is None else packed.num_weights(name, size)
        for name, size in elements.items()
    )
    if num_parameters == 0:
        raise ModelRefused(f"{directory} holds no weights as safetensors")
    pooling = read_pooling(directory)
    if pooling is not None:
        return Footprint(
            num_parameters, pooling.max_tokens, num_parameters * FP32_BYTES, 0, packed=packed
        )
    return Footprint(
        num_parameters=num_parameters,
        context_length=context_length(config),
        weight_bytes=num_parameters * bytes_per_element,
        kv_bytes_per_token=(
            _kv_elements_per_token(config) * (bytes_per_kv_element or bytes_per_element)
        ),
        packed=packed,
    )


def read_adapter_footprint(directory: Path, bytes_per_element: int) -> Footprint:
    """The footprint of an adapter beside its base. Raises ModelRefused when it cannot be read."""
    read_adapter_config(directory)
    num_parameters = sum(_num_elements(directory / ADAPTER_WEIGHTS).values())
    return Footprint(num_parameters, 0, num_parameters * bytes_per_element, 0)


def _num_elements(path: Path) -> dict[str, int]:
    """Elements of the tensors of one safetensors file, by its header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_BYTES_MAX:
                raise ModelRefused(f"{path.name} cannot be read: its header is too long")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        return {n: prod(entry["shape"]) for n, entry in header.items() if n != "__metadata__"}
    except UNREADABLE as fault:
        raise ModelRefused(f"{path.name} cannot be read: {fault}") from fault


def told_bytes(num_bytes: float) -> str:
    """A size in words, to three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < KILO:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= KILO
    return f"{num_bytes:,.1f} TB"


def _kv_elements_per_token(config: dict[str, Any]) -> int:
    text: dict[str, Any] = config.get("text_config") or config
    heads = _first(text, ATTENTION_HEADS) or 1
    head_dim = text.get("head_dim") or (_first(text, HIDDEN) or 0) // heads
    kv_heads = _first(text, KV_HEADS) or heads
    return 2 * (_first(text, LAYERS) or 1) * kv_heads * int(head_dim)


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    found = (config.get(name) for name in names)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ModelRefused(f"config.json in {directory} cannot be read: {fault}") from fault
    if not isinstance(config, dict):
        raise ModelRefused(f"config.json in {directory} is not a JSON object")
    return config
