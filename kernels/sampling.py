"""From logits to token ids: temperature, top-k, top-p, min-p and a draw that a seed fixes.

For one row of logits l, temperature T, the kept set K and the token drawn:

    w_i = exp((l_i - max l) / T)
    K   = the top_k largest w, of those the fewest whose share reaches top_p, of those w_i >= min_p
    u   = uniform(hash(seed, position)) in [0, 1)
    token = the first i with  sum_{j in K, j <= i} w_j  >  u * sum_{j in K} w_j

Temperature 0 takes the largest logit (the first among equals). The randomness is a function of
(seed, position) alone and every sum belongs to one row, so a request draws the same tokens
whatever shares its batch. No row is ever sorted whole unless its kept set is larger than
NUM_CANDIDATES: sorting 64 rows of 49152 costs more than the forward pass of a small model.

Sources: nucleus sampling, arXiv 1904.09751; min-p, arXiv 2407.01082; splitmix64 (Steele et al.,
OOPSLA 2014) for the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_CANDIDATES = 256
# What `sample` returns for a row without a finite largest logit (NaN, or everything masked).
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each of B rows is sampled. All tensors are [B] on the logits' device.

    temperature: fp32, 0 = greedy. top_p: fp32 in (0, 1], 1 = off. top_k: int64, 0 = off.
    min_p: fp32 in [0, 1), 0 = off. seeds: int64. positions: int64, the index of the token drawn.
    is_all_greedy: a promise of the caller that saves the rest of the work.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    is_all_greedy: bool = False

    @classmethod
    def build(
        cls,
        *,
        temperature: Sequence[float],
        top_p: Sequence[float],
        top_k: Sequence[int],
        min_p: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """A batch from lists; seeds of any size are reduced to 64 bits."""
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            seeds=torch.tensor([_signed64(s) for s in seeds], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            is_all_greedy=all(t == 0 for t in temperature),
        )

    def rows(self, index: torch.Tensor) -> SamplingBatch:
        """The batch of these rows alone."""
        return SamplingBatch(
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
        )


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token per row: logits [B, V] in any float dtype -> token ids [B] int64.

    A row whose largest logit is not finite gets NO_TOKEN: its request has failed, the others have
    not. The logits are not changed.
    """
    largest, tokens = logits.max(dim=-1)
    if not batch.is_all_greedy:
        # top_k = 1 is greedy too, and stays so when two logits are equal.
        drawn = ((batch.temperature > 0) & (batch.top_k != 1)).nonzero().squeeze(1)
        if drawn.numel():
            weights = _weights(logits[drawn], largest[drawn], batch.temperature[drawn])
            tokens[drawn] = _draw(weights, batch.rows(drawn))
    return torch.where(torch.isfinite(largest), tokens, NO_TOKEN)


def _weights(
    logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """w [R, V] fp32: 1 for the largest logit; rows without a finite largest come out as NaN."""
    weights = logits.float() - largest.float()[:, None]
    return weights.div_(temperature[:, None]).exp_()


def _draw(weights: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Token ids [R] drawn from weights [R, V], filtered as each row asks."""
    uniform = uniform_from_seed(batch.seeds, batch.positions)
    tokens = torch.empty_like(batch.seeds)
    is_cut = (batch.top_k > 0) | (batch.top_p < 1)
    whole, cut = (~is_cut).nonzero().squeeze(1), is_cut.nonzero().squeeze(1)
    if whole.numel():
        kept = weights[whole]
        kept.masked_fill_(kept < batch.min_p[whole, None], 0)
        tokens[whole] = _first_beyond(kept, uniform[whole])
    if cut.numel():
        num_candidates = min(NUM_CANDIDATES, weights.shape[1])
        tokens[cut] = _draw_from_candidates(
            weights[cut], uniform[cut], batch.rows(cut), num_candidates
        )
    return tokens


def _draw_from_candidates(
    weights: torch.Tensor, uniform: torch.Tensor, batch: SamplingBatch, num_candidates: int
) -> torch.Tensor:
    """The draw of rows with a top-k or top-p, among each row's largest `num_candidates` weights.

    A row whose kept set turns out to be larger is drawn again with the whole vocabulary: the choice
    is that row's own, so its token does not depend on the batch.
    """
    vocabulary = weights.shape[1]
    # 1. the candidates, largest first, cut to top_k
    values, token_ids = weights.topk(num_candidates, dim=1)  # [R, C]
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocabulary)[:, None]
    is_kept = torch.arange(num_candidates, device=weights.device) < top_k
    mass = torch.where(is_kept, values, 0).cumsum(dim=1)
    # 2. the share of each that precedes a candidate decides on top_p; the first always stays
    total = torch.where(
        top_k <= num_candidates, mass[:, -1:], weights.sum(1, keepdim=True, dtype=torch.float64)
    )
    target = (batch.top_p[:, None] * total).float()
    preceding = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    is_kept &= (preceding < target) | (batch.top_p[:, None] >= 1)
    is_kept &= values >= batch.min_p[:, None]
    is_kept[:, 0] = True
    # 3. the draw goes in the order of token ids
    order = token_ids.argsort(dim=1)
    kept = torch.where(is_kept, values, 0).gather(1, order)
    drawn = _first_beyond(kept, uniform)[:, None]
    tokens = token_ids.gather(1, order.gather(1, drawn)).squeeze(1)
    if num_candidates < vocabulary:
        is_complete = (top_k <= num_candidates) | (
            (top_k == vocabulary) & (batch.top_p[:, None] < 1) & (mass[:, -1:] >= target)
        )
        larger = (~is_complete.squeeze(1)).nonzero().squeeze(1)
        if larger.numel():
            tokens[larger] = _draw_from_candidates(
                weights[larger], uniform[larger], batch.rows(larger), vocabulary
            )
    return tokens


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


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed64(0x94D049BB133111EB)


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
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1)
    token = logits.gather(1, token_ids[:, None]).squeeze(1) - normaliser
    top, top_token_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogProbs(token, top_token_ids, top - normaliser[:, None])
