"""SGLang's scheduler as a plan function: a batch of prefills whenever there can be one, else decodes.

A prompt longer than the chunk goes on alone at the head. Waiting requests are admitted first come first
served while their prompt, and a share of what every running request may still generate, fit. When
memory is full, the requests with the least output are retracted and computed again.

Source: sglang's schedule_policy.py and scheduler.py (chunks of 8192 tokens on an 80 GB GPU). Its share
adapts between 0.7 and 0.1; here it is fixed at 0.4, as a plan function has no memory.
"""

import numpy as np

from engine.messages import CostModel
from engine.scheduling.plan import Chunk, Limits, Plan, PlannerState, PrefillState
from engine.scheduling.planner import PlanFunction

NEW_TOKEN_RATIO = 0.4
CLIP_MAX_NEW_TOKENS = 4096


def sglang(new_token_ratio: float = NEW_TOKEN_RATIO) -> PlanFunction:
    """The policy; `new_token_ratio` of the output that a request may still ask for is reserved."""

    def plan(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
        chunks = _prefill_batch(state, limits, new_token_ratio)
        if chunks:
            return Plan(chunks, np.empty(0, dtype=np.intp), [], [])
        retracted = _retracted(state)
        decodes = np.delete(np.arange(len(state.decodes)), retracted)
        stalled = [] if len(state.decodes) else _stalled(state)
        return Plan([], decodes, stalled, retracted)

    return plan


def _prefill_batch(state: PlannerState, limits: Limits, ratio: float) -> list[Chunk]:
    size = limits.block_size
    num_tokens_left = limits.max_step_tokens
    growth = np.minimum(state.decodes.num_output_left, CLIP_MAX_NEW_TOKENS)
    num_unpromised = state.num_free_blocks * size - ratio * float(growth.sum())
    num_free = state.num_free_blocks
    num_free_slots = state.num_free_slots
    is_empty = len(state.decodes) == 0 and not any(each.is_admitted for each in state.prefills)
    chunks: list[Chunk] = []
    for index in _in_line(state.prefills):
        prefill = state.prefills[index]
        num_tokens = min(prefill.num_remaining, num_tokens_left)
        needed = max(0, -(-(prefill.num_computed + num_tokens) // size) - prefill.num_held)
        if not prefill.is_admitted:
            output = ratio * min(prefill.num_output_left, CLIP_MAX_NEW_TOKENS)
            asked = prefill.num_remaining + output + prefill.num_evictable_hits * size
            is_too_large = asked > num_unpromised and not is_empty
            if is_too_large or prefill.num_slots > num_free_slots:
                break
            needed += prefill.num_evictable_hits
            num_unpromised -= asked
            num_free_slots -= prefill.num_slots
        if num_tokens <= 0 or needed > num_free:
            break
        chunks.append(Chunk(index, num_tokens))
        num_tokens_left -= num_tokens
        num_free -= needed
        is_empty = False
    return chunks


def _in_line(prefills: list[PrefillState]) -> list[int]:
    """The one that has begun, then retracted ones, then the others by arrival."""

    def place(index: int) -> tuple[bool, bool, int, float]:
        prefill = prefills[index]
        return (not prefill.is_admitted, prefill.order < 0, prefill.order, -prefill.waited_s)

    return sorted(range(len(prefills)), key=place)


def _retracted(state: PlannerState) -> list[int]:
    """Least output first, of equal ones the longest; the last one always stays."""
    decodes = state.decodes
    shortage = int(decodes.num_new_blocks.sum()) - state.num_free_blocks
    retracted: list[int] = []
    if shortage <= 0:
        return retracted
    by_output = np.lexsort((-decodes.context_lens, decodes.num_generated)).tolist()
    for index in by_output[:-1]:
        retracted.append(index)
        shortage -= int(decodes.num_held[index] + decodes.num_new_blocks[index])
        if shortage <= 0:
            break
    return retracted


def _stalled(state: PlannerState) -> list[int]:
    """Nothing decodes and no prefill can go on: the newest gives its blocks back."""
    admitted = [index for index, each in enumerate(state.prefills) if each.is_admitted]
    return sorted(admitted, key=lambda index: -state.prefills[index].order)[:1]
