"""Whom to preempt when blocks run out: the cheapest victim, and never the sequence admitted first.

That one finishes, then the next one is the first: no two sequences can take blocks from each other
for ever. Source: sparing sequences late in their life is TRAIL (arXiv 2410.01035).
"""

from dataclasses import dataclass

import numpy as np

from engine.messages import CostModel
from engine.scheduling.plan import Chunk, PlannerState

MAX_PREEMPTIONS = 2
"""After this many it is preempted only when no other is left, and reserves all it may use."""
LATE_SHARE = 0.6
"""Of the expected output: from there on a sequence is spared, for it soon frees its blocks."""


def choose_victims(
    state: PlannerState, chunks: list[Chunk], shortage: int, cost_model: CostModel | None
) -> tuple[list[int], list[int]]:
    """Whom to preempt to free `shortage` blocks: paused prefills, then the cheapest decodes."""
    prefills: list[int] = []
    decodes: list[int] = []
    if shortage <= 0:
        return prefills, decodes
    safe = _safe(state)
    chosen = {chunk.index for chunk in chunks}
    for index in _paused_by_key(state, safe):
        if shortage <= 0:
            break
        if index not in chosen:
            prefills.append(index)
            shortage -= state.prefills[index].num_held
    for index in _decodes_by_cost(state, cost_model):
        if shortage <= 0:
            break
        if index != safe.decode:
            decodes.append(index)
            shortage -= int(state.decodes.num_held[index] + state.decodes.num_new_blocks[index])
    return prefills, decodes


@dataclass(frozen=True, slots=True)
class _Safe:
    """The one sequence that may not be preempted: an index into either list."""

    prefill: int | None
    decode: int | None


def _safe(state: PlannerState) -> _Safe:
    """The sequence that was admitted first; of several choices the one that is farthest."""
    order = state.decodes.order
    admitted = [index for index, prefill in enumerate(state.prefills) if prefill.is_admitted]
    first = min(admitted, key=lambda index: state.prefills[index].order, default=None)
    if len(order) == 0 or (first is not None and state.prefills[first].order < order.min()):
        return _Safe(first, None)
    return _Safe(None, int(np.lexsort((-state.decodes.num_generated, order))[0]))


def _paused_by_key(state: PlannerState, safe: _Safe) -> list[int]:
    """Admitted prefills that may be preempted, the least urgent first."""
    prefills = state.prefills
    paused = [
        index
        for index, prefill in enumerate(prefills)
        if prefill.is_admitted and index != safe.prefill
    ]
    return sorted(paused, key=lambda index: -prefills[index].key)


def _decodes_by_cost(state: PlannerState, cost_model: CostModel | None) -> list[int]:
    """Decodes in the order of preemption: seconds to compute again per block freed.

    Those preempted often, and those near their expected end, come last.
    """
    decodes = state.decodes
    context = decodes.context_lens.astype(np.float64)
    if cost_model is None:
        restore = context
    else:
        pairs_s = cost_model.per_prefill_context_s * context * context / 2
        restore = cost_model.base_s + cost_model.per_token_s * context + pairs_s
    cost = restore / np.maximum(decodes.num_held, 1)
    is_late = decodes.num_generated > LATE_SHARE * state.expected_output_tokens
    is_tired = decodes.num_preemptions >= MAX_PREEMPTIONS
    order: list[int] = np.lexsort((-decodes.order, cost, is_late, is_tired)).tolist()
    return order


def stalled_prefill(state: PlannerState) -> list[int]:
    """The victim when paused prefills hold every block and none of them can go on."""
    return _paused_by_key(state, _safe(state))[:1]
