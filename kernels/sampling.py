"""From logits to token ids: temperature, top-k, top-p, min-p and a draw that a seed fixes.

For one row of logits l, temperature T, the kept set K and the token drawn:

    w_i = exp((l_i - max l) / T)
    t_k = the top_k-th largest w
    t_p = the largest t with  sum_{w_i >= t} w_i  >=  top_p * sum_{w_i >= t_k} w_i
    K   = {i : w_i >= max(t_k, t_p, min_p)}
    u   = uniform(hash(seed, position)) in [0, 1)
    token = the first i with  sum_{j in K, j <= i} w_j  >  u * sum_{j in K} w_j

Equals of the last one kept are kept too, so no order among equals matters. Temperature 0 takes the
largest logit (the first among equals). The randomness is a function of (seed, position) alone and
every sum belongs to one row: a request draws the same tokens whatever shares its batch. No row is
ever sorted whole: 64 rows of 49152 would take longer than the forward pass of a small model.

Sources: nucleus sampling, arXiv 1904.09751; min-p, arXiv 2407.01082; splitmix64 (Steele et al.,
OOPSLA 2014) for the hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu import library as cpu
from kernels.cpu import sampling as cpu_sampling
from kernels.sampling_batch import SamplingBatch, signed64
from kernels.sampling_kernel import log_probs_with_triton, sample_with_triton
from kernels.triton_support import runs_triton

# Where thresholds are looked for first: 0.2 ms for 49152 logits, against 1.3 ms for a search.
NUM_CANDIDATES = 256
# Rows that are searched together: their float64 copies stay near the caches.
ROWS_AT_ONCE = 8
# What `sample` returns for a row without a finite largest logit (NaN, or everything masked).
NO_TOKEN = -1


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token per row: logits [B, V] in any float dtype -> token ids [B] int64.

    A row whose largest logit is not finite gets NO_TOKEN: its request has failed, the others have
    not. The logits are not changed.
    """
    library = cpu.active()
    if library is not None and library.supports(logits):
        return cpu_sampling.sample(library, logits, batch)
    if runs_triton(logits):
        return sample_with_triton(logits, batch)
    largest, tokens = logits.max(dim=-1)
    if not batch.is_all_greedy:
        # top_k = 1 is greedy too, and stays so when two logits are equal.
        is_drawn = (batch.temperature > 0) & (batch.top_k != 1)
        if bool(is_drawn.all()):
            tokens = _draw(logits, largest, batch)
        else:
            rows = is_drawn.nonzero().squeeze(1)
            if rows.numel():
                tokens[rows] = _draw(logits[rows], largest[rows], batch.rows(rows))
    return torch.where(torch.isfinite(largest), tokens, NO_TOKEN)


def _draw(logits: torch.Tensor, largest: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Token ids [R] drawn from logits [R, V]; anything for rows without a finite largest."""
    weights = logits.float() - largest.float()[:, None]
    weights.div_(batch.temperature[:, None]).exp_()
    thresholds = batch.min_p
    is_cut = (batch.top_k > 0) | (batch.top_p < 1)
    if bool(is_cut.any()):
        rows = is_cut.nonzero().squeeze(1)
        cut = _cut_thresholds(weights[rows], batch.top_k[rows], batch.top_p[rows])
        thresholds = thresholds.index_put((rows,), torch.maximum(thresholds[rows], cut))
    if bool((thresholds > 0).any()):
        weights.masked_fill_(weights < thresholds[:, None], 0)
    return _first_beyond(weights, uniform_from_seed(batch.seeds, batch.positions))


def _cut_thresholds(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """max(t_k, t_p) [R] of weights [R, V], found among each row's largest NUM_CANDIDATES.

    Rows whose kept set may be larger are searched. That choice is a row's own, so its token does
    not depend on the batch.
    """
    vocabulary = weights.shape[1]
    num_candidates = min(NUM_CANDIDATES, vocabulary)
    values = weights.topk(num_candidates, dim=1).values  # [R, C], largest first
    last = values[:, -1]
    has_k, has_p = (top_k > 0) & (top_k < vocabulary), top_p < 1
    rank = torch.where(has_k, top_k, 1).clamp(max=num_candidates) - 1
    t_k = torch.where(has_k, values.gather(1, rank[:, None]).squeeze(1), 0)
    mass = values.double().masked_fill(values < t_k[:, None], 0).cumsum(dim=1)
    total = torch.where(has_k, mass[:, -1], weights.sum(dim=1, dtype=torch.float64))
    target = top_p * total
    num_below = (mass < target[:, None]).sum(dim=1).clamp(max=num_candidates - 1)
    t_p = values.gather(1, num_below[:, None]).squeeze(1)
    found = torch.where(has_p, torch.maximum(t_k, t_p), t_k)
    # What equals the last candidate may have equals beyond it; weights of 0 are never drawn.
    is_unsure = has_k & ((top_k > num_candidates) | (t_k == last))
    is_unsure |= has_p & ((mass[:, -1] < target) | (found == last))
    is_unsure &= last > 0
    if num_candidates < vocabulary:
        all_unsure = is_unsure.nonzero().squeeze(1)
        for first in range(0, len(all_unsure), ROWS_AT_ONCE):
            rows = all_unsure[first : first + ROWS_AT_ONCE]
            found[rows] = _search_thresholds(weights[rows], top_k[rows], top_p[rows])
    return found


def _search_thresholds(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """max(t_k, t_p) [R] of weights [R, V], however many are kept."""
    masses = weights.double()
    t_k = torch.zeros_like(top_p)
    has_k = (top_k > 0) & (top_k < weights.shape[1])
    if bool(has_k.any()):
        t_k = torch.where(has_k, _threshold(weights, torch.ones_like(masses), top_k.double()), t_k)
        masses.masked_fill_(weights < t_k[:, None], 0)
    has_p = top_p < 1
    if not bool(has_p.any()):
        return t_k
    t_p = _threshold(weights, masses, top_p * masses.sum(dim=1))
    return torch.where(has_p, torch.maximum(t_k, t_p), t_k)


def _threshold(weights: torch.Tensor, amounts: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The largest t [R] with  sum_{w_i >= t} amounts_i >= target, of weights [R, V] in [0, 1].

    Floats >= 0 are ordered as their bit patterns, so t is found ten bits at a time: a histogram of
    the amounts over those bits, of the weights that agree with t so far, tells the next ones.
    Amounts are float64, so the order of a sum shows nowhere.
    """
    bits = weights.view(torch.int32).clamp(0, _BITS_OF_ONE).long()  # NaN has to fall into some bin
    found = torch.zeros_like(target, dtype=torch.int64)
    for shift in (20, 10, 0):
        digit, above = _digit_reaching(bits >> shift & 1023, amounts, target)
        found |= digit << shift
        target = target - above
        if shift:
            amounts = amounts.masked_fill(bits >> shift != (found >> shift)[:, None], 0)
    return found.int().view(torch.float32)


def _digit_reaching(
    digits: torch.Tensor, amounts: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest digit [R] that lifts the sum from the top to target, and the sum [R] above it."""
    sums = amounts.new_zeros((digits.shape[0], 1025))
    sums.scatter_add_(1, 1024 - digits, amounts)  # the highest digit comes at index 1
    running = sums.cumsum(dim=1)
    index = (running < target[:, None]).sum(dim=1).clamp(1, 1024)
    return 1024 - index, running.gather(1, index[:, None] - 1).squeeze(1)


def _first_beyond(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index [R] where the running sum of weights [R, C] exceeds uniform [R] * total."""
    running = weights.cumsum(dim=1)
    thresholds = uniform[:, None] * running[:, -1:]
    found = torch.searchsorted(running, thresholds, right=True).squeeze(1)
    # Only a row of NaN runs past the end, and `sample` answers NO_TOKEN for it.
    return found.clamp_(max=weights.shape[1] - 1)


def uniform_from_seed(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1) with 24 random bits, a function of seeds [B] and positions [B] int64 alone."""
    state = _mix64(seeds + _GOLDEN) + positions * _GOLDEN
    return ((_mix64(state) >> 40) & 0xFFFFFF).float() * 2.0**-24


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64, whose arithmetic wraps as unsigned does."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_BITS_OF_ONE = 0x3F800000  # 1.0 as fp32
_GOLDEN = signed64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = signed64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = signed64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """Natural logarithms of probabilities, before temperature and filters.

    token: [B] fp32, of the tokens asked for. top_token_ids: [B, n] int64 and top: [B, n] fp32, the
    most probable ones, largest first.
    """

    token: torch.Tensor
    top_token_ids: torch.Tensor
    top: torch.Tensor


def log_probs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogProbs:
    """Log-probabilities of token_ids [B] and of the num_top best under logits [B, V]."""
    num_top = min(num_top, logits.shape[1])
    if runs_triton(logits):
        return LogProbs(*log_probs_with_triton(logits, token_ids, num_top))
    every = logits.float().log_softmax(dim=-1)
    top, top_token_ids = every.topk(num_top, dim=-1)
    return LogProbs(every.gather(1, token_ids[:, None]).squeeze(1), top_token_ids, top)
