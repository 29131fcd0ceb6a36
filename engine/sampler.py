"""From logits to the step's tokens: adjust the rows that ask for it, draw, and look up logprobs.

The draw itself is `kernels.sampling`; a token depends on its own row, its request's seed and its
position alone, never on what else shares the batch.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import AdjustedRow, StepBatch
from engine.messages import PromptLogprobs, TokenLogprob
from engine.scheduling.slots import SlotTable, has_penalties
from kernels.sampling import log_probs, sample
from kernels.sampling_batch import SamplingBatch


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
    logits: torch.Tensor, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]
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
        positions=torch.from_numpy(batch.sample_positions).to(device),
        is_all_greedy=not temperature.any(),
    )
    tokens = sample(chosen_from, sampling)
    wanted = slots.num_logprobs[rows]
    return Sampled(tokens.cpu().numpy(), _logprobs(logits, tokens, wanted))


def adjust_logits(logits: torch.Tensor, adjusted: list[AdjustedRow]) -> torch.Tensor:
    """A copy of the logits with penalties, biases, minimum lengths and grammars applied."""
    out = logits.float().clone()
    _penalise(out, [each for each in adjusted if has_penalties(each.sequence.request.sampling)])
    _add_biases(out, adjusted)
    _forbid_to_stop(out, adjusted)
    for sequence, rows in groupby(adjusted, key=lambda each: each.sequence):
        if sequence.structure is not None:
            ahead = list(rows)
            drafts = ahead[-1].drafts.tolist()
            sequence.structure.mask_ahead([out[each.row] for each in ahead], drafts)
    return out


def _penalise(out: torch.Tensor, penalised: list[AdjustedRow]) -> None:
    """Make what was said already less likely, in the rows of `out` [R, vocab] that ask for it."""
    if not penalised:
        return
    samplings = [each.sequence.request.sampling for each in penalised]
    outputs = [_with_drafts(each.sequence.output_token_ids, each.drafts) for each in penalised]
    said = [
        output
        if sampling.repetition_penalty == 1.0
        else _with_drafts(each.sequence.token_ids[: each.sequence.num_tokens], each.drafts)
        for each, sampling, output in zip(penalised, samplings, outputs, strict=True)
    ]
    cells, _ = _count_cells(said, out.shape[1])
    own_cells, own_counts = _count_cells(outputs, out.shape[1])
    counts = np.zeros(len(cells), dtype=np.float32)
    counts[np.searchsorted(cells, own_cells)] = own_counts
    owner, columns = np.divmod(cells, out.shape[1])
    rows = np.array([each.row for each in penalised], dtype=np.int64)[owner]

    def of_cell(numbers: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.array(numbers, dtype=np.float32)[owner]).to(out.device)

    at = _on((rows, columns), out)
    some, in_output = out[at], torch.from_numpy(counts).to(out.device)
    repetition = of_cell([s.repetition_penalty for s in samplings])
    some = some * torch.where(some > 0, 1 / repetition, repetition)
    some -= of_cell([s.frequency_penalty for s in samplings]) * in_output
    some -= of_cell([s.presence_penalty for s in samplings]) * (in_output > 0)
    out[at] = some


def _with_drafts(token_ids: NDArray[np.int32], drafts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([token_ids, drafts]) if len(drafts) else token_ids


def _count_cells(
    token_ids: list[NDArray[np.int32]], vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct tokens of each list, as list · vocab_size + id in ascending order; how often."""
    owners, ids = _places(
        list(range(len(token_ids))), [some.astype(np.int64) for some in token_ids]
    )
    return np.unique(owners * vocab_size + ids, return_counts=True)


def _add_biases(out: torch.Tensor, adjusted: list[AdjustedRow]) -> None:
    """Add the callers' biases to out [R, vocab], those of all rows at once."""
    biases = [(each.row, each.sequence.request.sampling.logit_bias or {}) for each in adjusted]
    ids = [np.fromiter(bias, np.int64, len(bias)) for _, bias in biases]
    values = [np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biases]
    rows, columns = _places([row for row, _ in biases], ids)
    is_there = columns < out.shape[1]
    if is_there.any():
        at = (rows[is_there], columns[is_there])
        added = np.concatenate(values)[is_there]
        out.index_put_(_on(at, out), torch.from_numpy(added).to(out.device), accumulate=True)


def _forbid_to_stop(out: torch.Tensor, adjusted: list[AdjustedRow]) -> None:
    """No row of out [R, vocab] may stop before its minimum length."""
    early = [
        (row, sequence.request.sampling.stop_token_ids)
        for row, sequence, drafts in adjusted
        if sequence.num_generated + len(drafts) < sequence.request.sampling.min_tokens
    ]
    rows, columns = _places([row for row, _ in early], [np.array(s, np.int64) for _, s in early])
    is_there = columns < out.shape[1]
    never = torch.tensor(-torch.inf, dtype=out.dtype, device=out.device)
    out.index_put_(_on((rows[is_there], columns[is_there]), out), never)


Places = tuple[NDArray[np.int64], NDArray[np.int64]]


def _places(rows: list[int], columns: list[NDArray[np.int64]]) -> Places:
    """(row, column) of every entry of `columns`, which has a list for each row."""
    repeated = np.repeat(np.array(rows, dtype=np.int64), [len(some) for some in columns])
    return repeated, np.concatenate([NO_TOKENS, *columns])


def _on(places: Places, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = places
    return torch.from_numpy(rows).to(like.device), torch.from_numpy(columns).to(like.device)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """The model's own log-probabilities (before any adjustment) of some rows, where they are."""

    chosen: torch.Tensor
    """[n] fp32, of the tokens that were chosen."""
    top: torch.Tensor
    """[n, num_top] fp32, of the likeliest."""
    top_ids: torch.Tensor
    """[n, num_top] int64"""

    @classmethod
    def of(
        cls, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
    ) -> "LogprobColumns":
        """logits: [R, vocab], tokens: [R], rows: [n], whose columns they are.

        Of a row that failed, and has a negative token, those of token 0: nobody is told of it.
        """
        token_ids = tokens.index_select(0, rows).clamp(min=0)
        found = log_probs(logits.index_select(0, rows), token_ids, num_top)
        return cls(found.token, found.top, found.top_token_ids)

    def tell(self, rows: list[int], wanted: NDArray[np.int32]) -> dict[int, TokenLogprob]:
        """By row, as many of the likeliest as each wants; the columns are on the host."""
        chosen, values, ids = self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist()
        return {
            row: TokenLogprob(
                logprob=chosen[at],
                top=tuple(zip(ids[at], values[at], strict=True))[: int(wanted[row])],
            )
            for at, row in enumerate(rows)
        }


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, wanted: NDArray[np.int32]
) -> dict[int, TokenLogprob]:
    rows = np.flatnonzero(wanted >= 0)
    if not len(rows):
        return {}
    index = torch.from_numpy(rows).to(logits.device)
    return LogprobColumns.of(logits, tokens, index, int(wanted.max())).tell(rows.tolist(), wanted)
