"""How likely the tokens of a prompt were: what is told to callers who score texts.

The rows come from the prefill itself, a step's worth at a time (`PROMPT_ROWS_MAX` bounds them), so no
prompt ever has all its logits in memory. They are the model's own, before any adjustment.
"""

from collections.abc import Iterator

import numpy as np
import torch

from engine.batch import PromptSpan
from engine.messages import PromptLogprobs
from kernels.sampling import log_probs

ROWS_AT_ONCE = 32
"""Rows whose fp32 copies exist at the same time: 32 of 150,000 logits are 19 MB."""
LEAST_LOGPROB = -9999.0
"""In the place of minus infinity, which JSON has not; the same as vLLM's. (A row without any finite
logit fails its request where the next token is sampled.)"""


def prompt_logprobs(logits: torch.Tensor, spans: list[PromptSpan]) -> list[PromptLogprobs]:
    """logits: [Q, vocab] of the rows before the tokens of `spans` -> what is to be told of each."""
    told = []
    start = 0
    for span in spans:
        end = start + len(span.positions)
        told.append(_of_span(logits[start:end], span))
        start = end
    return told


def _of_span(logits: torch.Tensor, span: PromptSpan) -> PromptLogprobs:
    num_top = span.sequence.request.sampling.num_prompt_logprobs
    assert num_top is not None
    num_top = min(num_top, logits.shape[1])
    ids = span.sequence.token_ids[span.positions.start : span.positions.stop].astype(np.int64)
    parts = list(_parts(logits, torch.from_numpy(ids).to(logits.device), num_top))
    logprobs, ranks, top_ids, top_logprobs = (
        torch.cat(part).cpu() for part in zip(*parts, strict=True)
    )
    return PromptLogprobs(
        first_position=span.positions.start,
        num_tokens=len(span.positions),
        logprobs=_fp32(logprobs),
        ranks=_int32(ranks),
        num_top=num_top,
        top_ids=_int32(top_ids),
        top_logprobs=_fp32(top_logprobs),
    )


def _parts(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logprobs [n], ranks [n], and ids and logprobs [n, num_top] of the likeliest; a few rows each."""
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = logits[start : start + ROWS_AT_ONCE]
        ids = token_ids[start : start + ROWS_AT_ONCE]
        found = log_probs(rows, ids, num_top)
        ranks = (rows > rows.gather(1, ids[:, None])).sum(dim=1) + 1
        yield found.token, ranks, found.top_token_ids, found.top


def _fp32(values: torch.Tensor) -> bytes:
    finite = values.nan_to_num(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)
    return finite.numpy().astype("<f4").tobytes()


def _int32(values: torch.Tensor) -> bytes:
    return values.numpy().astype("<i4").tobytes()
