"""From logits to the step's tokens: adjust the rows that ask for it, draw, and look up logprobs.

The draw itself is `kernels.sampling`; a token depends on its own row, its request's seed and its
position alone, never on what else shares the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import StepBatch
from engine.messages import PromptLogprobs, Sampling, TokenLogprob
from engine.scheduling.slots import SlotTable
from engine.sequence import Sequence
from kernels.sampling import SamplingBatch, sample


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [R]; a negative one means that its row held no finite logit."""

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprob]
    """By row, for those that want them."""
    vectors: tuple[bytes | None, ...] = ()
    """What a model that pools answers in the place of tokens, by sample row: fp32, little-endian."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """One for each of the batch's prompt spans."""


NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
NOTHING_SAMPLED = Sampled(NO_TOKENS, {})


def sample_step(
    logits: torch.Tensor, batch: StepBatch, slots: SlotTable, adjusted: list[tuple[int, Sequence]]
) -> Sampled:
    """logits: [R, vocab] -> one token per row. `adjusted`: the rows whose logits change first."""
    rows = batch.sample_slots
    chosen_from = adjust_logits(logits, adjusted) if adjusted else logits
    device = logits.device
    temperature = slots.temperature[rows]
    sampling = SamplingBatch(
        temperature=torch.from_numpy(temperature).to(device),
        top_p=torch.from_numpy(slots.top_p[rows]).to(device),
        top_k=torch.from_numpy(slots.top_k[rows].astype(np.int64)).to(device),
        min_p=torch.from_numpy(slots.min_p[rows]).to(device),
        seeds=torch.from_numpy(slots.seed[rows]).to(device),
        positions=torch.from_numpy(slots.num_tokens[rows].astype(np.int64)).to(device),
        is_all_greedy=not temperature.any(),
    )
    tokens = sample(chosen_from, sampling)
    wanted = slots.num_logprobs[rows]
    return Sampled(tokens.cpu().numpy(), _logprobs(logits, tokens, wanted))


def adjust_logits(logits: torch.Tensor, adjusted: list[tuple[int, Sequence]]) -> torch.Tensor:
    """A copy of the logits with biases, penalties, minimum lengths and grammars applied."""
    out = logits.float().clone()
    index = torch.tensor([row for row, _ in adjusted], device=out.device)
    some = out[index]  # [A, vocab]
    sequences = [sequence for _, sequence in adjusted]
    samplings = [sequence.request.sampling for sequence in sequences]
    in_all = _count_tokens([s.token_ids[: s.num_tokens] for s in sequences], some)
    in_output = _count_tokens([s.output_token_ids for s in sequences], some)
    repetition = _column([s.repetition_penalty for s in samplings], some)
    factor = torch.where(some > 0, 1 / repetition, repetition)
    some = torch.where(in_all > 0, some * factor, some)
    some -= _column([s.frequency_penalty for s in samplings], some) * in_output
    some -= _column([s.presence_penalty for s in samplings], some) * (in_output > 0)
    for row, (sampling, sequence) in enumerate(zip(samplings, sequences, strict=True)):
        _bias_row(some[row], sampling, sequence.num_generated)
        if sequence.structure is not None:
            sequence.structure.mask(some[row])
    out[index] = some
    return out


def _bias_row(row: torch.Tensor, sampling: Sampling, num_generated: int) -> None:
    """Add the caller's biases to row [vocab], and forbid to stop before the minimum length."""
    vocab_size = len(row)
    bias = {id_: b for id_, b in (sampling.logit_bias or {}).items() if 0 <= id_ < vocab_size}
    if bias:
        ids = torch.tensor(list(bias), device=row.device)
        row[ids] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    if num_generated < sampling.min_tokens:
        stops = [id_ for id_ in sampling.stop_token_ids if 0 <= id_ < vocab_size]
        row[torch.tensor(stops, dtype=torch.int64, device=row.device)] = -torch.inf


def _count_tokens(token_ids: list[NDArray[np.int32]], like: torch.Tensor) -> torch.Tensor:
    """How often each token occurs: one list per row -> [A, vocab]."""
    lens = [len(ids) for ids in token_ids]
    rows = torch.from_numpy(np.repeat(np.arange(len(lens)), lens)).to(like.device)
    ids = torch.from_numpy(np.concatenate(token_ids).astype(np.int64)).to(like.device)
    ones = torch.ones(len(ids), dtype=like.dtype, device=like.device)
    return torch.zeros_like(like).index_put_((rows, ids), ones, accumulate=True)


def _column(numbers: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: NDArray[np.int32]
) -> dict[int, TokenLogprob]:
    """The model's own log-probabilities (before any adjustment) for the rows that want them."""
    rows = np.flatnonzero(wanted >= 0).tolist()
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits.device)
    log_probs = logits[index].float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, tokens[index, None].clamp(min=0))[:, 0].tolist()
    most = int(wanted.max())
    top = log_probs.topk(most, dim=-1) if most else None
    values = top.values.tolist() if top else [[]] * len(rows)
    ids = top.indices.tolist() if top else [[]] * len(rows)
    return {
        row: TokenLogprob(
            logprob=chosen[at],
            top=tuple(zip(ids[at], values[at], strict=True))[: int(wanted[row])],
        )
        for at, row in enumerate(rows)
    }
