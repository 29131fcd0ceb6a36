"""What this machine can do, measured when a worker starts: the precision to use, seconds per step.

Takes about two seconds. The cost model is a non-negative least-squares fit over synthetic steps
through the real model: prefills of several lengths, then decodes of several batch sizes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import CostModel
from engine.models.model import KVBlocks, Model
from kernels.attention_metadata import AttentionMetadata
from kernels.linear import PackedLinear, linear

REPETITIONS = 2
PREFILL_LENS = (32, 128, 512)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT = 256
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class _Step:
    """A synthetic step: sequences that compute `query_lens` tokens each, up to `context_lens`."""

    query_lens: list[int]
    context_lens: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def context_read(self) -> float:
        """Σ over the tokens of the context that each reads, as `CostModel` counts it."""
        pairs = zip(self.query_lens, self.context_lens, strict=True)
        return sum(n * (length - n) + n * n / 2 for n, length in pairs)

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // BLOCK_SIZE) for length in self.context_lens)


def choose_dtype(device: torch.device) -> torch.dtype:
    """bf16 where this machine multiplies it faster than fp32, by the very kernels that will run."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    seconds = {dtype: _products_s(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(seconds, key=lambda dtype: seconds[dtype])


def fit_cost_model(model: Model, kv_cache: KVBlocks, num_blocks: int) -> CostModel:
    """Time synthetic steps in `kv_cache`, whose content is overwritten, and fit their seconds."""
    steps = [_Step([length], [length]) for length in PREFILL_LENS]
    steps += [_Step([1] * batch, [DECODE_CONTEXT] * batch) for batch in DECODE_BATCHES]
    context_length = model.spec.context_length
    steps = [
        step
        for step in steps
        if step.num_blocks <= num_blocks and max(step.context_lens) <= context_length
    ]
    rows = [[1.0, float(step.num_tokens), step.context_read] for step in steps]
    seconds = [_best_s(_runner(model, kv_cache, step)) for step in steps]
    base_s, per_token_s, per_context_s = _fit(np.array(rows), np.array(seconds))
    return CostModel(base_s=base_s, per_token_s=per_token_s, per_context_s=per_context_s)


def _fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float, float]:
    """Least squares of relative errors with no negative factor: what would be one is left out."""
    weighted = rows / seconds[:, None]
    used = [0, 1, 2]
    while True:
        factors, *_ = np.linalg.lstsq(weighted[:, used], np.ones(len(seconds)), rcond=None)
        if (factors >= 0).all():
            found = dict(zip(used, factors.tolist(), strict=True))
            return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
        used.pop(int(factors.argmin()))


def _runner(model: Model, kv_cache: KVBlocks, step: _Step) -> Callable[[], object]:
    tables: list[list[int]] = []
    next_block = 0
    for length in step.context_lens:
        count = -(-length // BLOCK_SIZE)
        tables.append(list(range(next_block, next_block + count)))
        next_block += count
    metadata = AttentionMetadata.build(
        query_lens=step.query_lens,
        context_lens=step.context_lens,
        block_tables=tables,
        device=model.device,
    )
    token_ids = torch.arange(step.num_tokens, device=model.device) % model.spec.vocab_size
    rows = metadata.query_start[1:].long() - 1

    def run() -> object:
        with torch.inference_mode():
            return model.forward(token_ids, kv_cache, metadata, rows).argmax(dim=-1).cpu()

    return run


def _best_s(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def _products_s(dtype: torch.dtype) -> float:
    """A few products as decode (1 row) and prefill (128 rows) need them, on fresh weights each."""
    layers = [PackedLinear(torch.ones(2048, 1024, dtype=dtype)) for _ in range(16)]

    def run(num_rows: int) -> Callable[[], object]:
        x = torch.ones(num_rows, 1024, dtype=dtype)
        return lambda: [linear(x, layer) for layer in layers]

    return _best_s(run(1)) + _best_s(run(128))
