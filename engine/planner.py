"""Which tokens the next step computes: one pure function, state in, plan out.

Prefill half, then decode half. Prefills go in the order of their key (shortest remaining work,
aged by arrival), pause between chunks, and share a budget of *predicted seconds*: a token at a
long context costs more than one at a short one. Decodes ride along in the same batch. A request
is admitted only when the blocks it is expected to grow into are not promised to others.

No sequence starves and nothing thrashes: the sequence that was admitted first is never
preempted, so it finishes, and then the next one is the first. A request that waited for memory
longer than `backfill_lock_s` is overtaken by nobody.

Source: the order and the time budget follow "PRISM" in our design study; reservation and the
locked head are EASY backfilling (Lifka 1995); sparing late sequences is TRAIL (arXiv 2410.01035).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from engine.messages import CostModel

MAX_PREEMPTIONS = 2
"""After this many it is preempted only when no other is left, and reserves all it may use."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The balance of one step; see `EngineSettings` for the meaning of each."""

    block_size: int
    max_step_tokens: int
    step_s: float
    idle_step_s: float
    gap_s: float
    prefill_share: float
    paused_share: float
    backfill_lock_s: float


@dataclass(frozen=True, slots=True)
class PrefillState:
    """A request whose prompt is not wholly computed: waiting, or paused between chunks."""

    key: float
    num_computed: int
    """Tokens in the KV cache, or found there by the prefix cache while it waits."""
    num_remaining: int
    num_held: int
    """Blocks in its table, or those of the prefix hit."""
    num_evictable_hits: int
    """Blocks of the hit that nobody references: taking them uses up free blocks."""
    num_reserved: int
    """Blocks that it is expected to take beyond those held: the rest of the prompt and growth."""
    num_slots: int
    num_output_left: int
    """Output tokens that it may still generate: the fence, not a prediction."""
    is_admitted: bool
    order: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class DecodeState:
    """The decoding sequences as columns, [num_decodes] each."""

    context_lens: NDArray[np.int32]
    num_new_blocks: NDArray[np.int32]
    """Blocks that this step writes into and that are not held yet (0 or 1)."""
    num_held: NDArray[np.int32]
    num_reserved: NDArray[np.int32]
    """Blocks of expected growth, those of this step included."""
    num_generated: NDArray[np.int32]
    num_output_left: NDArray[np.int32]
    """Output tokens that each may still generate: the fence, not a prediction."""
    num_preemptions: NDArray[np.int32]
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True)
class PlannerState:
    """Everything that a plan depends on."""

    prefills: list[PrefillState]
    decodes: DecodeState
    num_free_blocks: int
    num_blocks: int
    num_free_slots: int
    expected_output_tokens: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of `prefills[index]`."""

    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Indices point into the lists of the `PlannerState`."""

    chunks: list[Chunk]
    decodes: NDArray[np.intp]
    preempted_prefills: list[int]
    preempted_decodes: list[int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be computed."""
        return not self.chunks and len(self.decodes) == 0


PlanFunction = Callable[[PlannerState, Limits, CostModel | None], Plan]
"""How a step is decided: `plan` below, or a model of another engine's policy."""


def plan(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """The next step. Changes nothing."""
    decodes_s = decode_seconds(state.decodes, cost_model)

    # 1. prefill half
    chunks = _PrefillHalf(state, limits, cost_model, decodes_s).chunks()

    # 2. decode half
    num_free = state.num_free_blocks - _blocks_taken(state, chunks, limits.block_size)
    shortage = int(state.decodes.num_new_blocks.sum()) - num_free
    preempted_prefills, preempted_decodes = _victims(state, chunks, shortage, cost_model)
    decodes = np.delete(np.arange(len(state.decodes)), preempted_decodes)
    if not chunks and len(decodes) == 0 and not preempted_prefills:
        preempted_prefills = _stalled_prefill(state)
    return Plan(chunks, decodes, preempted_prefills, preempted_decodes)


def decode_seconds(decodes: DecodeState, cost_model: CostModel | None) -> float:
    """Predicted seconds that the decodes add to a step."""
    if cost_model is None or len(decodes) == 0:
        return 0.0
    context = float(decodes.context_lens.sum())
    return cost_model.per_token_s * len(decodes) + cost_model.per_context_s * context


class _PrefillHalf:
    """Fills the step's budget with chunks in key order; lives for one call of `plan`."""

    def __init__(
        self,
        state: PlannerState,
        limits: Limits,
        cost_model: CostModel | None,
        decodes_s: float,
    ) -> None:
        self.state = state
        self.limits = limits
        self.cost_model = cost_model
        self.num_tokens_left = max(0, limits.max_step_tokens - len(state.decodes))
        self.seconds_left = prefill_budget_s(len(state.decodes), decodes_s, limits)
        self.num_free = state.num_free_blocks - int(state.decodes.num_new_blocks.sum())
        admitted = [prefill for prefill in state.prefills if prefill.is_admitted]
        self.num_unpromised = (
            state.num_free_blocks
            - int(state.decodes.num_reserved.sum())
            - sum(prefill.num_reserved for prefill in admitted)
        )
        self.num_free_slots = state.num_free_slots
        self.num_paused_blocks = sum(prefill.num_held for prefill in admitted)
        self.is_machine_empty = not admitted and len(state.decodes) == 0

    def chunks(self) -> list[Chunk]:
        """The chunks of this step, most urgent first."""
        chunks: list[Chunk] = []
        prefills = self.state.prefills
        is_locked = False
        for index in sorted(range(len(prefills)), key=lambda index: prefills[index].key):
            prefill = prefills[index]
            if self.num_tokens_left <= 0 or self.seconds_left <= 0:
                break
            if not prefill.is_admitted and (is_locked or not self._fits(prefill)):
                is_locked |= prefill.waited_s > self.limits.backfill_lock_s
                continue
            num_tokens = self._chunk_tokens(prefill, is_first=not chunks)
            if num_tokens > 0 and self._may_pause(prefill, num_tokens):
                chunks.append(Chunk(index, num_tokens))
                self._spend(prefill, num_tokens)
        return chunks

    def _fits(self, prefill: PrefillState) -> bool:
        if prefill.num_slots > self.num_free_slots:
            return False
        needed = prefill.num_evictable_hits + prefill.num_reserved
        return self.is_machine_empty or needed <= self.num_unpromised

    def _may_pause(self, prefill: PrefillState, num_tokens: int) -> bool:
        """Whether a chunk that leaves the prefill unfinished may begin it."""
        if prefill.is_admitted or num_tokens == prefill.num_remaining or self.is_machine_empty:
            return True
        return self.num_paused_blocks <= self.limits.paused_share * self.state.num_blocks

    def _chunk_tokens(self, prefill: PrefillState, *, is_first: bool) -> int:
        """The largest chunk within time, tokens and blocks; whole blocks unless it finishes."""
        size = self.limits.block_size
        num_free = self.num_free - (0 if prefill.is_admitted else prefill.num_evictable_hits)
        room = (prefill.num_held + num_free) * size - prefill.num_computed
        most = min(prefill.num_remaining, self.num_tokens_left, room)
        num_tokens = min(most, self._affordable_tokens(prefill))
        if num_tokens < prefill.num_remaining:
            num_tokens -= (prefill.num_computed + num_tokens) % size
        if is_first:  # a step that predicts too long still makes progress
            num_tokens = max(num_tokens, min(most, size))
        return max(0, num_tokens)

    def _affordable_tokens(self, prefill: PrefillState) -> int:
        """The largest n with per_token·n + per_context·(n·computed + n²/2) <= seconds left."""
        if self.cost_model is None:
            return self.num_tokens_left
        linear = self.cost_model.per_token_s + self.cost_model.per_context_s * prefill.num_computed
        square = self.cost_model.per_context_s / 2
        if square <= 0:
            return int(self.seconds_left / linear) if linear > 0 else self.num_tokens_left
        root = sqrt(linear * linear + 4 * square * self.seconds_left)
        return int((root - linear) / (2 * square))

    def _spend(self, prefill: PrefillState, num_tokens: int) -> None:
        self.num_tokens_left -= num_tokens
        self.seconds_left -= chunk_seconds(prefill, num_tokens, self.cost_model)
        self.num_free -= _new_blocks(prefill, num_tokens, self.limits.block_size)
        if not prefill.is_admitted:
            self.num_unpromised -= prefill.num_evictable_hits + prefill.num_reserved
            self.num_free_slots -= prefill.num_slots
            self.num_paused_blocks += prefill.num_held + prefill.num_reserved
            self.is_machine_empty = False


def prefill_budget_s(num_decodes: int, decodes_s: float, limits: Limits) -> float:
    """Predicted seconds that prefills may add to this step.

    With long decodes the budget grows, so that prefills keep their share of the machine, but the
    whole step stays within the gap that a stream may see between two tokens.
    """
    if num_decodes == 0:
        return limits.idle_step_s
    share = limits.prefill_share / (1 - limits.prefill_share) * decodes_s
    return min(max(limits.step_s, share), max(limits.step_s / 4, limits.gap_s - decodes_s))


def chunk_seconds(prefill: PrefillState, num_tokens: int, cost_model: CostModel | None) -> float:
    """Predicted seconds that a chunk adds to a step."""
    if cost_model is None:
        return 0.0
    context = num_tokens * prefill.num_computed + num_tokens * num_tokens / 2
    return cost_model.per_token_s * num_tokens + cost_model.per_context_s * context


def _new_blocks(prefill: PrefillState, num_tokens: int, block_size: int) -> int:
    """Free blocks that a chunk uses up."""
    num_needed = -(-(prefill.num_computed + num_tokens) // block_size) - prefill.num_held
    return max(0, num_needed) + (0 if prefill.is_admitted else prefill.num_evictable_hits)


def _blocks_taken(state: PlannerState, chunks: list[Chunk], block_size: int) -> int:
    return sum(
        _new_blocks(state.prefills[chunk.index], chunk.num_tokens, block_size) for chunk in chunks
    )


def _victims(
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
        linear = cost_model.base_s + cost_model.per_token_s * context
        restore = linear + cost_model.per_context_s * context * context / 2
    cost = restore / np.maximum(decodes.num_held, 1)
    is_late = decodes.num_generated > 0.6 * state.expected_output_tokens
    is_tired = decodes.num_preemptions >= MAX_PREEMPTIONS
    order: list[int] = np.lexsort((-decodes.order, cost, is_late, is_tired)).tolist()
    return order


def _stalled_prefill(state: PlannerState) -> list[int]:
    """The victim when paused prefills hold every block and none of them can go on."""
    return _paused_by_key(state, _safe(state))[:1]
