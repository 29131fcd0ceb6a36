"""How much of a GPU the KV cache may have: what the weights and the largest step leave.

Measured, not computed: a step of the largest size is run before the cache is made.
"""

from collections.abc import Callable

import torch

from engine.device.device import Device
from engine.models.model import KVBlocks, Model
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import BLOCK_SIZE

RESERVED_SHARE = 0.05
"""Of what is left then: for graphs, the library's own memory, and what fragments."""


def kv_pool_bytes(gpu: Device, model: Model, max_step_tokens: int, granted_bytes: int) -> int:
    """Bytes for the KV cache, `granted_bytes` at most; the model is loaded, its cache is not."""
    peak_bytes = gpu.peak_bytes(_largest_step(model, max_step_tokens))
    left = gpu.memory().free_bytes - peak_bytes
    return max(0, min(granted_bytes, int(left * (1 - RESERVED_SHARE))))


def _largest_step(model: Model, num_tokens: int) -> Callable[[], object]:
    """Whole prompts of so many tokens together, each as long as the context may be."""
    longest = min(num_tokens, model.spec.context_length)
    lens = [longest] * (num_tokens // longest)
    if rest := num_tokens % longest:
        lens.append(rest)

    def run() -> object:
        kv_cache, metadata = _cache_for(model, lens)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
        rows = metadata.query_start[1:].long() - 1
        with torch.inference_mode():
            return model.forward(token_ids, kv_cache, metadata, rows).argmax(dim=-1)

    return run


def _cache_for(model: Model, lens: list[int]) -> tuple[KVBlocks, AttentionMetadata]:
    tables: list[list[int]] = []
    num_blocks = 0
    for length in lens:
        count = -(-length // BLOCK_SIZE)
        tables.append(list(range(num_blocks, num_blocks + count)))
        num_blocks += count
    metadata = AttentionMetadata.build(
        query_lens=lens, context_lens=lens, block_tables=tables, device=model.device
    )
    return model.create_kv_cache(num_blocks), metadata
