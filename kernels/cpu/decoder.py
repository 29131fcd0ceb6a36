"""A whole decoder step in one call of the C++ library: `decoder.h` declares the same structures.

Between two operations called from Python the threads must meet twice and Python runs alone: at
batch 1 that took longer than reading all the weights (41 ms a step against 9 when measured).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kernels.cpu.library import DTYPES, CpuLibrary, PackedWeight

if TYPE_CHECKING:
    from kernels.attention_metadata import AttentionMetadata
    from kernels.kv_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A packed weight and maybe its bias, fp32."""

    weight: PackedWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CpuLayer:
    """One layer. Norm weights are fp32."""

    input_norm: torch.Tensor
    qkv: CpuLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: CpuLinear
    mlp_norm: torch.Tensor
    gate: CpuLinear
    up: CpuLinear
    down: CpuLinear
    window: int | None


class _Linear(Structure):
    _fields_: ClassVar = [("packed", c_void_p), ("bias", c_void_p), ("form", c_int32)]


class _Layer(Structure):
    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("qkv", _Linear),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", _Linear),
        ("mlp_norm", c_void_p),
        ("gate", _Linear),
        ("up", _Linear),
        ("down", _Linear),
        ("window", c_int64),
    ]


class _Model(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "vocabulary")),
        *((name, c_int64) for name in ("max_positions", "rotary_dim")),
        ("cos_sin", c_void_p),
        ("layers", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("head", _Linear),
        ("eps", c_float),
        ("kv_dtype", c_int32),
    ]


class _Step(Structure):
    _fields_: ClassVar = [
        ("hidden", c_void_p),
        ("num_tokens", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_sequences", c_int64),
        *((name, c_void_p) for name in ("query_start", "context_lens", "block_tables")),
        ("max_blocks", c_int64),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("num_blocks", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("logits", c_void_p),
    ]


class CpuDecoder:
    """A model of the Llama structure, ready to run in one call a step."""

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[CpuLayer],
        final_norm: torch.Tensor,
        head: CpuLinear,
        *,
        cos_sin: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        kv_dtype: torch.dtype,
    ) -> None:
        self._library = library
        self._kept = (layers, final_norm, head, cos_sin)  # the structures hold plain pointers
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self.vocabulary = head.weight.out_features
        max_positions, _, half = cos_sin.shape
        self._model = _Model(
            num_layers=len(layers),
            hidden=head.weight.in_features,
            intermediate=layers[0].down.weight.in_features,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocabulary=self.vocabulary,
            max_positions=max_positions,
            rotary_dim=2 * half,
            cos_sin=cos_sin.data_ptr(),
            layers=self._layers,
            final_norm=final_norm.data_ptr(),
            head=_linear(head),
            eps=eps,
            kv_dtype=DTYPES[kv_dtype],
        )

    def forward(
        self,
        hidden: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """hidden: [T, hidden] fp32, destroyed -> fp32 logits of rows [R]: [R, vocabulary]."""
        assert kv_cache.is_packed
        assert hidden.is_contiguous()
        assert rows.is_contiguous()
        assert metadata.block_tables.is_contiguous()
        assert metadata.positions.numel() == metadata.slot_mapping.numel() == len(hidden)
        logits = torch.empty((len(rows), self.vocabulary))
        num_sequences, max_blocks = metadata.block_tables.shape
        pages = c_void_p * kv_cache.num_layers
        step = _Step(
            hidden=hidden.data_ptr(),
            num_tokens=len(hidden),
            positions=metadata.positions.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            num_sequences=num_sequences,
            query_start=metadata.query_start.data_ptr(),
            context_lens=metadata.context_lens.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            max_blocks=max_blocks,
            keys=pages(*(keys.data_ptr() for keys in kv_cache.keys)),
            values=pages(*(values.data_ptr() for values in kv_cache.values)),
            num_blocks=kv_cache.num_blocks,
            rows=rows.data_ptr(),
            num_rows=len(rows),
            logits=logits.data_ptr(),
        )
        self._library.decode(ctypes.byref(self._model), ctypes.byref(step))
        return logits


def _layer(layer: CpuLayer) -> _Layer:
    return _Layer(
        input_norm=layer.input_norm.data_ptr(),
        qkv=_linear(layer.qkv),
        query_norm=_pointer(layer.query_norm),
        key_norm=_pointer(layer.key_norm),
        output=_linear(layer.output),
        mlp_norm=layer.mlp_norm.data_ptr(),
        gate=_linear(layer.gate),
        up=_linear(layer.up),
        down=_linear(layer.down),
        window=layer.window or 0,
    )


def _linear(linear: CpuLinear) -> _Linear:
    return _Linear(
        packed=linear.weight.pointer, bias=_pointer(linear.bias), form=linear.weight.form
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
