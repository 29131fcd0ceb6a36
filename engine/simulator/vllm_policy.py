"""vLLM v1's scheduler as a plan function.

No phases: running requests in the order of admission, each as many tokens as the budget of the step
allows (decodes one), then waiting ones first come first served, until one does not fit: the head of
the line blocks everybody. Memory is not reserved for growth; when it is full the newest running
request is preempted, computed again from the start, and first in line.

Source: vllm/v1/core/sched/scheduler.py as of 2026-09 (defaults of the API server on an 80 GB GPU:
8192 tokens a step, 1024 sequences; the tokens and sequences here are the machine's `Limits`).
"""

import numpy as np

from engine.messages import CostModel
from engine.scheduling.plan import Chunk, Limits, Plan, PlannerState, PrefillState
from engine.scheduling.planner import PlanFunction


def vllm(long_prefill_threshold: int | None = None) -> PlanFunction:
    """The policy; `long_prefill_threshold` caps the tokens of one prompt in a step."""

    def plan(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
        step = _Step(state, limits, long_prefill_threshold)
        step.run_the_running()
        if not step.has_preempted:
            step.admit_the_waiting()
        return step.plan()

    return plan


class _Step:
    """Fills one step; lives for one call."""

    def __init__(self, state: PlannerState, limits: Limits, threshold: int | None) -> None:
        self.state = state
        self.block_size = limits.block_size
        self.threshold = threshold or limits.max_step_tokens
        self.num_tokens_left = limits.max_step_tokens
        self.num_free = state.num_free_blocks
        self.chunks: list[Chunk] = []
        self.decodes: list[int] = []
        self.preempted_prefills: list[int] = []
        self.preempted_decodes: list[int] = []

    @property
    def has_preempted(self) -> bool:
        return bool(self.preempted_prefills or self.preempted_decodes)

    def plan(self) -> Plan:
        decodes = np.array(sorted(self.decodes), dtype=np.intp)
        return Plan(self.chunks, decodes, self.preempted_prefills, self.preempted_decodes)

    def run_the_running(self) -> None:
        """In the order of admission, the oldest first; the newest make room."""
        prefills, decodes = self.state.prefills, self.state.decodes
        running = [(order, True, index) for index, order in enumerate(decodes.order.tolist())]
        running += [
            (prefill.order, False, index)
            for index, prefill in enumerate(prefills)
            if prefill.is_admitted
        ]
        running.sort()
        while running and self.num_tokens_left > 0:
            _, is_decode, index = running[0]
            needed = int(decodes.num_new_blocks[index]) if is_decode else self._needed(index)
            if needed > self.num_free:
                self._preempt(running.pop())
                continue
            running.pop(0)
            self.num_free -= needed
            if is_decode:
                self.decodes.append(index)
                self.num_tokens_left -= 1
            else:
                self._add(index)

    def admit_the_waiting(self) -> None:
        """First come first served; preempted ones, which have an order, before all others."""
        prefills = self.state.prefills
        waiting = [index for index, each in enumerate(prefills) if not each.is_admitted]
        waiting.sort(key=lambda index: _place_in_line(prefills[index]))
        num_free_slots = self.state.num_free_slots
        for index in waiting:
            if self.num_tokens_left <= 0 or prefills[index].num_slots > num_free_slots:
                return
            needed = self._needed(index) + prefills[index].num_evictable_hits
            if needed > self.num_free:
                return
            num_free_slots -= prefills[index].num_slots
            self.num_free -= needed
            self._add(index)

    def _tokens(self, index: int) -> int:
        remaining = self.state.prefills[index].num_remaining
        return min(remaining, self.threshold, self.num_tokens_left)

    def _needed(self, index: int) -> int:
        prefill = self.state.prefills[index]
        end = prefill.num_computed + self._tokens(index)
        return max(0, -(-end // self.block_size) - prefill.num_held)

    def _add(self, index: int) -> None:
        num_tokens = self._tokens(index)
        self.chunks.append(Chunk(index, num_tokens))
        self.num_tokens_left -= num_tokens

    def _preempt(self, victim: tuple[int, bool, int]) -> None:
        _, is_decode, index = victim
        if is_decode:
            self.preempted_decodes.append(index)
            self.num_free += int(self.state.decodes.num_held[index])
        else:
            self.preempted_prefills.append(index)
            self.num_free += self.state.prefills[index].num_held


def _place_in_line(prefill: PrefillState) -> tuple[bool, int, float]:
    return (prefill.order < 0, prefill.order, -prefill.waited_s)
