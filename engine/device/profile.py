"""How much of a GPU the KV cache may have: what the weights and the largest step leave.

Measured, not computed: a step of the largest size is run before the cache is made.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.device.device import Device
from engine.models.model import KVBlocks, Model
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import BLOCK_SIZE

RESERVED_SHARE = 0.05
"""Of what is left then: for graphs, the library's own memory, and what fragments."""


def kv_pool_bytes(
    gpu: Device, model: Model, *, max_step_tokens: int, max_running: int, granted_bytes: int
) -> int:
    """Bytes for the KV cache, `granted_bytes` at most; the model is loaded, its cache is not."""
    peak_bytes = gpu.peak_bytes(_largest_step(model, max_step_tokens, max_running))
    left = gpu.memory().free_bytes - peak_bytes
    return max(0, min(granted_bytes, int(left * (1 - RESERVED_SHARE))))


def _largest_step(model: Model, num_tokens: int, max_running: int) -> Callable[[], object]:
    """Whole prompts of so many tokens together, each as long as the context may be.

    Beside the scratch memory of as many decodes as there may be, which graphs hold all the time.
    """
    longest = min(num_tokens, model.spec.context_length)
    lens = [longest] * (num_tokens // longest)
    if rest := num_tokens % longest:
        lens.append(rest)

    def run() -> object:
        with torch.inference_mode():
            decodes = _run_decodes(model, max_running)
            kv_cache, metadata = _cache_for(model, lens)
            token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
            rows = metadata.query_start[1:].long() - 1
            tokens = model.forward(token_ids, kv_cache, metadata, rows).argmax(dim=-1)
        return tokens, decodes

    return run


def _run_decodes(model: Model, num_sequences: int) -> AttentionMetadata:
    """Decodes with contexts of which nothing is known: their metadata holds the scratch memory."""
    metadata = AttentionMetadata.build(
        query_lens=[1] * num_sequences,
        context_lens=[1] * num_sequences,
        block_tables=[[0]] * num_sequences,
        device=model.device,
    )
    metadata = replace(metadata, max_context_len=model.spec.context_length)
    token_ids = torch.zeros(num_sequences, dtype=torch.int64, device=model.device)
    model.forward(token_ids, model.create_kv_cache(1), metadata, token_ids)
    return metadata


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
