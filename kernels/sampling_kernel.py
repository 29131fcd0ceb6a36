"""Sampling and log-probabilities on a GPU: one program a row, and no row is ever sorted.

The formula is that of `kernels.sampling`. A threshold is the largest t among the weights w of a row
with  sum_{w_i >= t} a_i >= target  (a = 1 for top-k, a = w for top-p). Each pass over the row holds
two pivots against it, which cut what is left of the floats' order into three, and draws the ends in
to weights that are there: few passes for peaked rows, 19 for the worst. The noise is the CPU's, a
function of seed and position alone, and every sum is taken in an order of the row's own.

Sources: Qrita, arXiv 2602.01518; FlashInfer's dual-pivot rejection sampling, arXiv 2501.01005.
"""

from __future__ import annotations

import torch

from kernels.sampling_batch import SamplingBatch
from kernels.triton_support import jit, kernel, next_power_of_2, tl

MAX_BLOCK = 4096  # logits at once; 8192 spill registers
NUM_WARPS = 16


@jit
def _mix64(x: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _weights(
    logits_ptr: tl.tensor,
    columns: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """exp((l - max) / T) of some columns; -1 beyond the vocabulary."""
    is_there = columns < vocabulary
    x = tl.load(logits_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    return tl.where(is_there, tl.exp((x - largest) / temperature), -1.0)


@jit
def _threshold(
    logits_ptr: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    low: tl.tensor,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """The bits of the largest weight t with sum_{w >= t} a >= target, at least `low`, also bits.

    Weights lie in [0, 1], where floats are ordered as their bits. t is always in low .. high - 1.
    """
    high = 0x3F800001
    while high - low > 1:
        third = tl.maximum((high - low) // 3, 1)
        pivot, upper = low + third, tl.maximum(high - third, low + third)
        above, above_upper = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        next_up = tl.full([BLOCK], 0x3F800001, tl.int32)
        next_up_upper = tl.full([BLOCK], 0x3F800001, tl.int32)
        next_down = tl.full([BLOCK], -1, tl.int32)
        next_down_upper = tl.full([BLOCK], -1, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            weights = _weights(logits_ptr, columns, vocabulary, largest, temperature)
            bits = weights.to(tl.int32, bitcast=True)
            amounts = weights if BY_WEIGHT else tl.full([BLOCK], 1.0, tl.float32)
            above += tl.where(bits >= pivot, amounts, 0.0)
            above_upper += tl.where(bits >= upper, amounts, 0.0)
            next_up = tl.where(bits >= pivot, tl.minimum(next_up, bits), next_up)
            next_up_upper = tl.where(bits >= upper, tl.minimum(next_up_upper, bits), next_up_upper)
            next_down = tl.where(bits < pivot, tl.maximum(next_down, bits), next_down)
            next_down_upper = tl.where(
                bits < upper, tl.maximum(next_down_upper, bits), next_down_upper
            )
        if tl.sum(above_upper, axis=0) >= target:
            low = tl.min(next_up_upper, axis=0)
        elif tl.sum(above, axis=0) >= target:
            low = tl.min(next_up, axis=0)
            high = tl.maximum(tl.max(next_down_upper, axis=0) + 1, low + 1)
        else:
            high = tl.maximum(tl.max(next_down, axis=0) + 1, low + 1)
    return low


@jit
def _kept_mass(
    logits_ptr: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    threshold: tl.tensor,
    target: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(sum of the weights >= threshold; where the running sum exceeds target: block, sum before)."""
    running, before, found = 0.0, 0.0, -1
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        weights = _weights(logits_ptr, columns, vocabulary, largest, temperature)
        mass = tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=0)
        is_here = (found < 0) & (running + mass > target)
        found = tl.where(is_here, first, found)
        before = tl.where(is_here, running, before)
        running += mass
    return running, found, before


@jit
def _sample_kernel(
    logits_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    logits_stride: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    IS_GREEDY: tl.constexpr,
) -> None:
    """One program draws the token of one row, or takes the first of its largest logits."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2^31
    logits_ptr += row * logits_stride
    # 1. the largest logit
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    num_broken = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf"))
        x = x.to(tl.float32)
        best_at = tl.where(x > best, columns, best_at)
        best = tl.where(x > best, x, best)
        num_broken += (x != x).to(tl.int32)  # noqa: PLR0124 - only NaN differs from itself
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_at, vocabulary), axis=0)
    is_sound = (largest > float("-inf")) & (largest < float("inf"))
    is_sound = is_sound & (tl.sum(num_broken, axis=0) == 0)
    if not IS_GREEDY:
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        if is_sound & (temperature > 0) & (top_k != 1):
            # 2. thresholds
            top_p = tl.load(top_p_ptr + row)
            low = largest.to(tl.int32) * 0
            if (top_k > 0) & (top_k < vocabulary):
                low = _threshold(
                    *(logits_ptr, vocabulary, largest, temperature, top_k.to(tl.float32), low),
                    *(BLOCK, False),
                )
            threshold = low.to(tl.float32, bitcast=True)
            if top_p < 1:
                total, _, _ = _kept_mass(
                    logits_ptr, vocabulary, largest, temperature, threshold, 0.0, BLOCK
                )
                low = _threshold(
                    *(logits_ptr, vocabulary, largest, temperature, top_p * total, low),
                    *(BLOCK, True),
                )
                threshold = low.to(tl.float32, bitcast=True)
            threshold = tl.maximum(threshold, tl.load(min_p_ptr + row))
            # 3. the draw
            seed = tl.load(seeds_ptr + row).to(tl.uint64)
            position = tl.load(positions_ptr + row).to(tl.uint64)
            state = _mix64(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15
            uniform = (_mix64(state) >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8
            total, _, _ = _kept_mass(
                logits_ptr, vocabulary, largest, temperature, threshold, 0.0, BLOCK
            )
            target = uniform * total
            _, found, before = _kept_mass(
                logits_ptr, vocabulary, largest, temperature, threshold, target, BLOCK
            )
            columns = found + tl.arange(0, BLOCK)
            weights = _weights(logits_ptr, columns, vocabulary, largest, temperature)
            kept = tl.where(weights >= threshold, weights, 0.0)
            is_beyond = (before + tl.cumsum(kept, axis=0) > target) & (kept > 0)
            token = tl.min(tl.where(is_beyond, columns, vocabulary), axis=0)
            # The running sum may round to less than the block's sum did: then it is the last one.
            last = tl.max(tl.where(kept > 0, columns, -1), axis=0)
            token = tl.where(token < vocabulary, token, last)
    tl.store(tokens_ptr + row, tl.where(is_sound, token, -1).to(tl.int64))


@kernel("num_top")
def _log_probs_kernel(
    logits_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    top_ptr: tl.tensor,
    logits_stride: tl.tensor,
    vocabulary: tl.tensor,
    num_top: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row: l - logsumexp(l) of one token and of the num_top best, the first among equals."""
    row = tl.program_id(0).to(tl.int64)  # a row's offset may pass 2^31
    logits_ptr += row * logits_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf"))
        x = x.to(tl.float32)
        new_largest = tl.maximum(largest, x)
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = weight * tl.exp(largest - anchor) + tl.exp(x - anchor)
        largest = new_largest
    of_all = tl.max(largest, axis=0)
    normaliser = of_all + tl.log(tl.sum(weight * tl.exp(largest - of_all), axis=0))
    token = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(token_ptr + row, token - normaliser)
    previous, previous_at = float("inf"), -1
    for rank in range(0, num_top):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            is_there = columns < vocabulary
            x = tl.load(logits_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
            is_left = (x < previous) | ((x == previous) & (columns > previous_at))
            is_better = is_there & is_left & ((x > best) | (best_at == 0x7FFFFFFF))
            best = tl.where(is_better, x, best)
            best_at = tl.where(is_better, columns, best_at)
        previous = tl.max(best, axis=0)
        previous_at = tl.min(tl.where(best == previous, best_at, 0x7FFFFFFF), axis=0)
        tl.store(top_ids_ptr + row * num_top + rank, previous_at.to(tl.int64))
        tl.store(top_ptr + row * num_top + rank, previous - normaliser)


def sample_with_triton(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """See `kernels.sampling.sample`: logits [B, V] -> token ids [B] int64."""
    num_rows, vocabulary = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1
    if num_rows > 0:
        _sample_kernel[(num_rows,)](
            logits,
            tokens,
            batch.temperature,
            batch.top_p,
            batch.top_k,
            batch.min_p,
            batch.seeds,
            batch.positions,
            logits.stride(0),
            vocabulary,
            BLOCK=min(MAX_BLOCK, next_power_of_2(vocabulary)),
            IS_GREEDY=batch.is_all_greedy,
            num_warps=NUM_WARPS,
        )
    return tokens


def log_probs_with_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of token_ids [B]; ids and log-probabilities [B, num_top] of the best."""
    num_rows, vocabulary = logits.shape
    token = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1
    if num_rows > 0:
        _log_probs_kernel[(num_rows,)](
            logits,
            token_ids,
            token,
            top_ids,
            top,
            logits.stride(0),
            vocabulary,
            num_top,
            BLOCK=min(MAX_BLOCK, next_power_of_2(vocabulary)),
            num_warps=NUM_WARPS,
        )
    return token, top_ids, top
