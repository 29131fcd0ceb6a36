"""The balance of a step between prefills and decodes: how long one may be, and who rides along.

A GPU multiplies the batch and then reads the caches, so decodes in a prefill step save the launch
of a step of their own and one reading of the weights, and nothing else. Below the ridge that saving
is nearly all that they cost: they ride. Above it they may as well run later, by themselves, and
every prefill that waits gets its first token sooner: they are deferred, but only while no stream
falls behind its pace or is silent for longer than the gap.

Source: the crossover is that of exclusive batching (arXiv 2606.00516); the envelope of a stream,
from which slack is lent to prefills, is FairBatching's (arXiv 2510.14392).
"""

import numpy as np

from engine.messages import CostModel, StepWork
from engine.scheduling.plan import DecodeState, Limits, PlannerState


def decode_seconds(decodes: DecodeState, cost_model: CostModel | None) -> float:
    """Predicted seconds that the decodes add to a step that is compute-bound without them."""
    if cost_model is None or len(decodes) == 0:
        return 0.0
    context_s = cost_model.per_decode_context_s * float(decodes.context_lens.sum())
    return (cost_model.per_token_s + cost_model.per_sample_s) * len(decodes) + context_s


def prefill_budget_s(decodes: DecodeState, limits: Limits, cost_model: CostModel | None) -> float:
    """Predicted seconds that a step with nothing but this step's chunks may take.

    With long decodes the budget grows, so that prefills keep their share of the machine, but the
    whole step ends before the stream that has been silent longest would notice.
    """
    if len(decodes) == 0:
        return limits.idle_step_s
    decodes_s = decode_seconds(decodes, cost_model)
    share = limits.prefill_share / (1 - limits.prefill_share) * decodes_s
    left_s = limits.gap_s - float(decodes.silent_s.max()) - decodes_s
    return min(max(limits.step_s, share), max(limits.step_s / 4, left_s))


def decodes_ride(
    state: PlannerState, chunks: StepWork, limits: Limits, cost_model: CostModel | None
) -> bool:
    """Whether the decodes run in the same step as the chunks; if not, they wait for the next one."""
    decodes = state.decodes
    if cost_model is None or len(decodes) == 0 or _is_crowded(state, limits):
        return True
    decodes_only = _decodes_work(decodes)
    chunks_s = cost_model.step_s(chunks)
    mixed_s = cost_model.step_s(_sum(chunks, decodes_only))
    added_s = mixed_s - chunks_s

    # 1. they must: a stream would be silent too long if it waited for the step after this one
    if limits.gap_s - float(decodes.silent_s.max()) < chunks_s + mixed_s:
        return True
    # 2. it is cheap: most of what a step of their own would take is saved
    if added_s <= limits.ride_share * cost_model.step_s(decodes_only):
        return True
    # 3. it is not worth it: more stream seconds would be late than first tokens come sooner
    num_late = int(np.count_nonzero((decodes.ahead_s < chunks_s) & ~decodes.is_ahead))
    return state.num_unstarted * added_s <= num_late * chunks_s


def _is_crowded(state: PlannerState, limits: Limits) -> bool:
    """Deferred sequences hold their blocks for longer: not where blocks are scarce."""
    return state.num_free_blocks < (1 - limits.crowded_share) * state.num_blocks


def _decodes_work(decodes: DecodeState) -> StepWork:
    context = float(decodes.context_lens.sum())
    return StepWork(num_tokens=len(decodes), num_samples=len(decodes), decode_context=context)


def _sum(one: StepWork, other: StepWork) -> StepWork:
    return StepWork(
        num_tokens=one.num_tokens + other.num_tokens,
        num_samples=one.num_samples + other.num_samples,
        prefill_pairs=one.prefill_pairs + other.prefill_pairs,
        decode_context=one.decode_context + other.decode_context,
    )
