"""Which tokens the next step computes: one pure function, state in, plan out.

Prefill half, then decode half. Prefills go in the order of their key (shortest remaining work,
aged by arrival), pause between chunks, and share a budget of *predicted seconds*: a token at a
long context costs more than one at a short one. A step that ends a prompt ends soon: a chunk joins
it only where that brings the requests behind more than the first tokens in it lose. Decodes ride
along in the same batch where that is nearly free, and wait for prefills only as long as no stream
notices (`deferral`). A request is admitted only when the blocks it is expected to grow into are
not promised to others.

No sequence starves and nothing thrashes: the sequence that was admitted first is never
preempted, so it finishes, and then the next one is the first (`preemption`). A request that waited
for memory longer than `backfill_lock_s` is overtaken by nobody. Tenants that are ahead of others
(`recent_use`) come later, take no memory that those wait for, lend them what they are only expected
to grow into, and do not make their first tokens wait; the last slots are kept for tenants that hold few.

Source: the order and the time budget follow "PRISM" in our design study; reservation and the
locked head are EASY backfilling (Lifka 1995).
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np

from engine.cost_model import affordable_tokens
from engine.messages import CostModel, StepWork
from engine.scheduling.deferral import decodes_ride, prefill_budget_s
from engine.scheduling.plan import Chunk, Limits, Plan, PlannerState, PrefillState
from engine.scheduling.preemption import choose_victims, stalled_prefill

PlanFunction = Callable[[PlannerState, Limits, CostModel | None], Plan]
"""How a step is decided: `plan` below, or a model of another engine's policy."""


STREAM_WEIGHT = 0.3
"""What a second of a decoding stream counts beside one of a request without its first token.

Without it, steps get so short under load that throughput falls: on a simulated H100 with chat at
36 requests/s by 0.4 %, and the mean TTFT grows from 61 to 64 ms.
"""


def plan(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """The next step. Changes nothing.

    Without a cost model (none calibrated, or none to be trusted) steps are budgeted in tokens, and
    decodes always ride along.
    """
    # 1. prefill half
    half = _PrefillHalf(state, limits, cost_model)
    chunks = half.chunks()

    # 2. decode half
    if chunks and not decodes_ride(state, half.work, limits, cost_model):
        return Plan(chunks, np.empty(0, dtype=np.intp), [], [])
    preempted_prefills, preempted_decodes = choose_victims(
        state, chunks, shortage=-half.num_free, cost_model=cost_model
    )
    decodes = np.arange(len(state.decodes))
    if preempted_decodes:
        decodes = np.delete(decodes, preempted_decodes)
    if not chunks and len(decodes) == 0 and not preempted_prefills:
        preempted_prefills = stalled_prefill(state)
    return Plan(chunks, decodes, preempted_prefills, preempted_decodes)


class _Cost(NamedTuple):
    """What a chunk takes of the step: seconds are 0 where none are predicted."""

    pairs: float
    own_s: float
    """Its attention and its sample."""
    products_s: float
    """Of all chunks up to this one."""


class _PrefillHalf:
    """Fills the step's budget with chunks in key order; lives for one call of `plan`."""

    def __init__(self, state: PlannerState, limits: Limits, cost_model: CostModel | None) -> None:
        self.state = state
        self.limits = limits
        self.cost_model = cost_model
        # the chunks so far
        self.num_tokens = 0
        self.num_first = 0
        """Those that end a prompt: their requests get the first token after this step."""
        self.pairs = 0.0
        self.products_s = 0.0
        self.is_urgent = False
        """One of them is of a tenant that is not ahead, while others are."""
        # what they may still take
        self.num_tokens_left = _token_budget(len(state.decodes), limits, cost_model)
        budget_s = prefill_budget_s(state.decodes, limits, cost_model)
        self.seconds_left = budget_s - (cost_model.base_s if cost_model else 0.0)
        """For the products and the attention of the chunks."""
        self.num_fitting = self.num_tokens_left
        """No prefill could add more tokens than these; lowered when one had to be cut."""
        self.num_free = state.num_free_blocks - int(state.decodes.num_new_blocks.sum())
        """Blocks, after those that the decodes begin in this step."""
        admitted = [prefill for prefill in state.prefills if prefill.is_admitted]
        self.num_unpromised = (
            state.num_free_blocks
            - int(state.decodes.num_reserved.sum())
            - sum([prefill.num_reserved for prefill in admitted])
        )
        self.num_free_slots = state.num_free_slots
        self.num_paused_blocks = sum([prefill.num_held for prefill in admitted])
        self.is_machine_empty = not admitted and len(state.decodes) == 0
        self.is_contended = any(prefill.surplus_s > 0 for prefill in state.prefills)
        """Whether some tenants are ahead of others: what was promised to them is lent to these."""
        self.num_kept = int((1 - limits.crowded_share) * state.num_blocks)
        """Free blocks that are lent only to tenants that run little."""

    @property
    def work(self) -> StepWork:
        """What the chunks so far compute."""
        return StepWork(self.num_tokens, num_samples=self.num_first, prefill_pairs=self.pairs)

    def chunks(self) -> list[Chunk]:
        """The chunks of this step, most urgent first."""
        chunks: list[Chunk] = []
        prefills = self.state.prefills
        is_locked = False
        least_locked_s = inf
        keys = [prefill.key for prefill in prefills]
        for index in sorted(range(len(prefills)), key=keys.__getitem__):
            prefill = prefills[index]
            if self.num_fitting <= 0:
                break
            if not prefill.is_admitted:
                if is_locked or prefill.surplus_s > least_locked_s:
                    continue
                if not self._fits(prefill):
                    is_locked = prefill.waited_s > self.limits.backfill_lock_s
                    least_locked_s = min(least_locked_s, prefill.surplus_s)
                    continue
            if self.num_fitting < self._least_tokens(prefill, is_first=not chunks):
                continue  # neither the rest of its prompt nor a whole block
            num_tokens = self._chunk_tokens(prefill, is_first=not chunks)
            if num_tokens <= 0 or not self._may_pause(prefill, num_tokens):
                continue
            cost = self._cost(prefill, num_tokens)
            if chunks and not self._is_worth_its_delay(prefill, num_tokens, cost):
                break
            chunks.append(Chunk(index, num_tokens))
            self._spend(prefill, num_tokens, cost)
        return chunks

    def _least_tokens(self, prefill: PrefillState, *, is_first: bool) -> int:
        """What must fit for a turn; where nothing is cut, the first one takes it anyway."""
        if self.limits.is_whole:
            return 1 if is_first else prefill.num_remaining
        return min(prefill.num_remaining, self.limits.block_size)

    def _fits(self, prefill: PrefillState) -> bool:
        if self.is_machine_empty:
            return prefill.num_slots <= self.num_free_slots
        num_kept_slots = 0 if prefill.is_kept_for else self.limits.num_kept_slots
        if prefill.num_slots > self.num_free_slots - num_kept_slots:
            return False
        room = self.num_unpromised
        if self.is_contended and prefill.surplus_s <= 0:
            room = max(room, self.num_free - (0 if prefill.is_kept_for else self.num_kept))
        return prefill.num_evictable_hits + prefill.num_reserved <= room

    def _may_pause(self, prefill: PrefillState, num_tokens: int) -> bool:
        """Whether a chunk that leaves the prefill unfinished may begin it."""
        if prefill.is_admitted or num_tokens == prefill.num_remaining or self.is_machine_empty:
            return True
        return self.num_paused_blocks <= self.limits.paused_share * self.state.num_blocks

    def _cost(self, prefill: PrefillState, num_tokens: int) -> _Cost:
        cost_model = self.cost_model
        pairs = num_tokens * (prefill.num_computed + num_tokens / 2)
        if cost_model is None:
            return _Cost(pairs, 0.0, 0.0)
        own_s = cost_model.per_sample_s + cost_model.per_prefill_context_s * pairs
        return _Cost(pairs, own_s, cost_model.products_s(self.num_tokens + num_tokens))

    def _is_worth_its_delay(self, prefill: PrefillState, num_tokens: int, cost: _Cost) -> bool:
        """Whether the chunk should join those before it.

        It makes the first tokens that they end with later by what it adds to the step. By itself it
        would take a step of its own: what is saved there, all that wait behind it gain, and all
        streams. Tenants that are ahead may not delay the others at all.
        """
        cost_model = self.cost_model
        if cost_model is None:
            return True
        if self.is_urgent and prefill.surplus_s > 0:
            return False
        added_s = cost.products_s - self.products_s + cost.own_s
        alone_s = cost_model.base_s + cost_model.products_s(num_tokens) + cost.own_s
        num_behind = self.state.num_unstarted - self.num_first
        num_gaining = num_behind + STREAM_WEIGHT * len(self.state.decodes)
        return self.num_first * added_s <= num_gaining * (alone_s - added_s)

    def _chunk_tokens(self, prefill: PrefillState, *, is_first: bool) -> int:
        """The largest chunk within time, tokens and blocks; whole blocks unless it finishes."""
        size = self.limits.block_size
        num_free = self.num_free - (0 if prefill.is_admitted else prefill.num_evictable_hits)
        room = (prefill.num_held + num_free) * size - prefill.num_computed
        most = min(prefill.num_remaining, self.num_tokens_left, room)
        num_tokens = self._affordable_tokens(prefill, most)
        if num_tokens < prefill.num_remaining:
            if self.limits.is_whole:
                return prefill.num_remaining if is_first else 0
            num_tokens -= (prefill.num_computed + num_tokens) % size
        if is_first:  # a step that predicts too long still makes progress
            num_tokens = max(num_tokens, min(most, size))
        return max(0, num_tokens)

    def _affordable_tokens(self, prefill: PrefillState, most: int) -> int:
        cost_model = self.cost_model
        if cost_model is None or most <= 0:
            return most
        cost = self._cost(prefill, most)
        if cost.products_s + cost.own_s <= self.seconds_left:
            return most
        seconds = self.seconds_left - cost_model.per_sample_s
        self.num_fitting = self._affordable_after(0, self.num_tokens_left, seconds, cost_model)
        return self._affordable_after(prefill.num_computed, most, seconds, cost_model)

    def _affordable_after(
        self, num_cached: int, most: int, seconds: float, cost_model: CostModel
    ) -> int:
        return affordable_tokens(
            cost_model, seconds, num_before=self.num_tokens, num_cached=num_cached, most=most
        )

    def _spend(self, prefill: PrefillState, num_tokens: int, cost: _Cost) -> None:
        self.num_tokens += num_tokens
        self.num_tokens_left -= num_tokens
        self.num_fitting = min(self.num_fitting, self.num_tokens_left)
        self.pairs += cost.pairs
        self.seconds_left -= cost.own_s
        self.products_s = cost.products_s
        if num_tokens == prefill.num_remaining:
            self.num_first += 1
        self.is_urgent |= self.is_contended and prefill.surplus_s <= 0
        self.num_free -= _new_blocks(prefill, num_tokens, self.limits.block_size)
        if not prefill.is_admitted:
            self.num_unpromised -= prefill.num_evictable_hits + prefill.num_reserved
            self.num_free_slots -= prefill.num_slots
            self.num_paused_blocks += prefill.num_held + prefill.num_reserved
            self.is_machine_empty = False


def _token_budget(num_decodes: int, limits: Limits, cost_model: CostModel | None) -> int:
    """Tokens that chunks may add; without predicted seconds so few that a step stays short."""
    room = max(0, limits.max_step_tokens - num_decodes)
    if cost_model is not None:
        return room
    return min(room, max(limits.block_size, limits.untimed_step_tokens - num_decodes))


def _new_blocks(prefill: PrefillState, num_tokens: int, block_size: int) -> int:
    """Free blocks that a chunk uses up."""
    num_needed = -(-(prefill.num_computed + num_tokens) // block_size) - prefill.num_held
    return max(0, num_needed) + (0 if prefill.is_admitted else prefill.num_evictable_hits)
