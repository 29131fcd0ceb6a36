"""The rows of a vocabulary by token: hidden[t] = table[token[t]], fp32.

A projection to logits that is tied to the table has the same rows. Where it keeps them packed for
the register tiles of the C++ library, they are read from there, and there is no second copy of them
(54 MB of 257 in SmolLM2-135M, bf16).
"""

from __future__ import annotations

import torch

from kernels.cpu import library as cpu
from kernels.linear import PackedLinear


class Embedding:
    """A table [vocabulary, hidden], or the packed projection `tied` that was made of all of it."""

    def __init__(self, table: torch.Tensor, tied: PackedLinear | None) -> None:
        packed = None if tied is None else tied.packed
        shape = tuple(table.shape)
        is_whole = packed is not None and (packed.out_features, packed.in_features) == shape
        is_exact = packed is not None and packed.form == cpu.DTYPES.get(table.dtype)
        self._packed = packed if is_whole and is_exact else None
        self._table = None if self._packed is not None else table

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] int64 -> [T, hidden] fp32."""
        if self._table is not None:
            return self._table.index_select(0, token_ids).float()
        library = cpu.active()
        assert library is not None, "the table was packed for a library that is disabled"
        assert self._packed is not None
        return library.unpack_rows(self._packed, token_ids)
