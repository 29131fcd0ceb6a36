"""Launches every kernel that a step may need before there is a request.

A kernel is compiled when it is launched for the first time, which takes seconds: in a running engine
all streams would wait for it. What is compiled is kept on disk, so a later start is quick. Graphs
need none of this: capturing them launches all that they hold.
"""

from collections.abc import Iterator

import torch

from engine.models.model import KVBlocks, Model
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import BLOCK_SIZE
from kernels.paged_decode_attention import sequences_block
from kernels.sampling import log_probs, sample
from kernels.sampling_batch import SamplingBatch

NUM_ROWS = 4
"""Sampled by each way of sampling; how many makes no difference to the kernels."""


def warm_up(
    model: Model, kv_cache: KVBlocks, block: int, *, max_running: int, max_step_tokens: int
) -> None:
    """Steps of every shape by which kernels differ; all of them write to `block`, nobody's page."""
    for num_new, num_decodes in _shapes(max_running, max_step_tokens):
        lens = [num_new] + [1] * num_decodes
        metadata = AttentionMetadata.build(
            query_lens=lens,
            context_lens=lens,
            block_tables=[[block] * -(-length // BLOCK_SIZE) for length in lens],
            device=model.device,
        )
        token_ids = torch.zeros(sum(lens), dtype=torch.int64, device=model.device)
        rows = torch.zeros(NUM_ROWS, dtype=torch.int64, device=model.device)
        logits = model.forward(token_ids, kv_cache, metadata, rows)
    for temperature in (0.0, 1.0):
        sample(logits, _sampling(temperature, logits.device))
    log_probs(logits, rows, 1)


def _shapes(max_running: int, max_step_tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens of a prompt, decodes beside it): tiles differ by the first, lists by all together."""
    sizes = {sequences_block(count): count for count in range(max_running, 0, -1)}
    for count in sorted(sizes.values()):
        num_new = 2
        while num_new < 2 * max_step_tokens:
            yield min(num_new, max_step_tokens), count - 1
            num_new *= 2


def _sampling(temperature: float, device: torch.device) -> SamplingBatch:
    return SamplingBatch.build(
        temperature=[temperature] * NUM_ROWS,
        top_p=[0.9] * NUM_ROWS,
        top_k=[40] * NUM_ROWS,
        min_p=[0.0] * NUM_ROWS,
        seeds=[0] * NUM_ROWS,
        positions=[0] * NUM_ROWS,
        device=device,
    )
