"""The C++ library's sampling; see `kernels.sampling` for what it computes."""

from __future__ import annotations

import torch

from kernels.cpu.library import DTYPES, CpuLibrary
from kernels.sampling_batch import SamplingBatch


def sample(library: CpuLibrary, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row of logits [B, V]."""
    num_rows, vocabulary = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    options: tuple[torch.Tensor | None, ...] = (
        *(batch.temperature, batch.top_k, batch.top_p, batch.min_p),
        *(batch.seeds, batch.positions),
    )
    assert all(x is not None and x.is_contiguous() and len(x) == num_rows for x in options)
    if batch.is_all_greedy:
        options = (None,) * len(options)
    library.call(
        "sample",
        *(num_rows, vocabulary),
        *(logits.data_ptr(), logits.stride(0), DTYPES[logits.dtype]),
        *(None if x is None else x.data_ptr() for x in options),
        tokens.data_ptr(),
    )
    return tokens
