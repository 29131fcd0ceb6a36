"""Who used the seconds of a step: each tenant pays for the work that its own sequences were."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from engine.batch import StepBatch
from engine.messages import CostModel
from engine.sequence import Sequence

BY_TOKENS = CostModel(
    base_s=0.0, per_token_s=1.0, per_prefill_context_s=0.0, per_decode_context_s=0.0
)
"""Without a calibrated model every token weighs the same."""


def charge_step(
    sequences: list[Sequence], batch: StepBatch, cost_model: CostModel | None, seconds: float
) -> dict[str, float]:
    """Split the measured `seconds` of a step among tenants by the predicted cost of their work.

    `sequences`: those of the batch's chunks, then the decoding ones.
    """
    model = cost_model or BY_TOKENS
    query_lens = np.diff(batch.query_start).astype(np.float64)
    num_chunks = len(batch.chunks)
    num_drafts = batch.drafts.num_tokens
    pairs = query_lens * (batch.context_lens - query_lens / 2)
    pairs[num_chunks:] = num_drafts * batch.context_lens[num_chunks:]
    work = model.per_token_s * query_lens + model.per_prefill_context_s * pairs
    work[num_chunks:] += model.per_decode_context_s * batch.context_lens[num_chunks:]
    work[num_chunks:] += model.per_sample_s * (1 + num_drafts)
    if batch.prompt_spans:  # the rows of their logits
        work[:num_chunks] += model.per_sample_s * _num_prompt_rows(batch)
    total = float(work.sum())
    if total <= 0:
        work, total = query_lens, float(query_lens.sum())
    charges: dict[str, float] = defaultdict(float)
    for sequence, share in zip(sequences, (work * (seconds / total)).tolist(), strict=True):
        charges[sequence.request.tenant] += share
    return dict(charges)


def _num_prompt_rows(batch: StepBatch) -> NDArray[np.float64]:
    """[num_chunks]: prompt tokens whose logprobs each chunk tells."""
    starts = batch.query_start[: len(batch.chunks) + 1]
    return np.diff(np.searchsorted(batch.prompt_rows, starts)).astype(np.float64)
