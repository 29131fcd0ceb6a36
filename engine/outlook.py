"""What the planner sees of the sequences: their keys, their prefix hits, their expected growth."""

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import BlockManager
from engine.messages import CostModel, GenerateRequest
from engine.planner import MAX_PREEMPTIONS, DecodeState, PlannerState, PrefillState
from engine.sequence import Sequence
from engine.slots import SlotTable

MIN_GROWTH_TOKENS = 64
"""Reserved for a sequence that has already outlived the expected output length."""
EXPECTED_OUTPUT_TOKENS = 256.0
"""Before any request has finished."""
EXPECTATION_RATE = 0.05
"""Weight of one finished request in the running mean of output lengths."""
ONE_US = 1e-6


class Outlook:
    """Turns sequences and slot columns into a `PlannerState`. Changes no block and no slot."""

    def __init__(
        self, blocks: BlockManager, slots: SlotTable, cost_model: CostModel | None
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.cost_model = cost_model
        self.expected_output_tokens = EXPECTED_OUTPUT_TOKENS

    def learn_length(self, num_generated: int) -> None:
        """A request ended by itself after so many tokens: expect the next ones to do alike."""
        error = num_generated - self.expected_output_tokens
        self.expected_output_tokens += EXPECTATION_RATE * error

    def state(
        self, prefilling: list[Sequence], decode_slots: NDArray[np.intp], now_us: int
    ) -> PlannerState:
        """Everything that the next plan depends on."""
        forks = sum(s.num_choices - 1 for s in prefilling if s.is_admitted)
        return PlannerState(
            prefills=[self._prefill_state(sequence, now_us) for sequence in prefilling],
            decodes=self._decode_state(decode_slots),
            num_free_blocks=self.blocks.num_free,
            num_blocks=self.blocks.num_blocks,
            num_free_slots=self.slots.num_free - forks,
            expected_output_tokens=self.expected_output_tokens,
        )

    def _prefill_state(self, sequence: Sequence, now_us: int) -> PrefillState:
        size = self.blocks.block_size
        num_held, num_evictable = len(sequence.block_table), 0
        num_computed = sequence.num_computed
        if not sequence.is_admitted:
            num_held, num_evictable = self._estimate_hit(sequence)
            num_computed = num_held * size
        expected = self.blocks.blocks_for(sequence.num_tokens + self._growth_tokens(sequence))
        num_shared = sequence.num_tokens // size
        total = num_shared + sequence.num_choices * (expected - num_shared)
        return PrefillState(
            key=self._key(sequence.request, num_computed),
            num_computed=num_computed,
            num_remaining=sequence.num_tokens - num_computed,
            num_held=num_held,
            num_evictable_hits=num_evictable,
            num_reserved=max(0, total - num_held),
            num_slots=sequence.num_choices,
            num_output_left=sequence.request.authorized_tokens - sequence.num_generated,
            is_admitted=sequence.is_admitted,
            order=sequence.order,
            waited_s=(now_us - sequence.added_us) * ONE_US,
        )

    def _decode_state(self, decode_slots: NDArray[np.intp]) -> DecodeState:
        slots = self.slots
        size = self.blocks.block_size
        num_tokens = slots.num_tokens[decode_slots]
        num_generated = slots.num_generated[decode_slots]
        num_preemptions = slots.num_preemptions[decode_slots]
        num_held = slots.num_blocks[decode_slots]
        num_new = self.num_new_blocks(decode_slots)
        left = slots.num_authorized[decode_slots] - num_generated
        expected = np.maximum(self.expected_output_tokens - num_generated, MIN_GROWTH_TOKENS)
        growth = np.where(num_preemptions >= MAX_PREEMPTIONS, left, np.minimum(left, expected))
        num_reserved = -(-(num_tokens + growth.astype(np.int64)) // size) - num_held
        return DecodeState(
            context_lens=num_tokens,
            num_new_blocks=num_new,
            num_held=num_held,
            num_reserved=np.maximum(num_reserved, num_new).astype(np.int32),
            num_generated=num_generated,
            num_output_left=left,
            num_preemptions=num_preemptions,
            order=slots.order[decode_slots],
        )

    def num_new_blocks(self, decode_slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """[num_decodes]: 1 where the next token starts a block or writes into a shared one."""
        slots = self.slots
        capacity = slots.num_blocks[decode_slots] * self.blocks.block_size
        is_full = slots.num_tokens[decode_slots] > capacity
        return (is_full | slots.is_last_block_shared[decode_slots]).astype(np.int32)

    def _growth_tokens(self, sequence: Sequence) -> int:
        left = sequence.request.authorized_tokens - sequence.num_generated
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            return left
        expected = self.expected_output_tokens - sequence.num_generated
        return min(left, max(int(expected), MIN_GROWTH_TOKENS))

    def _key(self, request: GenerateRequest, num_computed: int) -> float:
        """The request's key, less the seconds of work that need not be done (again)."""
        if self.cost_model is None or num_computed == 0:
            return request.key
        linear = self.cost_model.per_token_s * num_computed
        saved_s = linear + self.cost_model.per_context_s * num_computed * num_computed / 2
        return request.key - saved_s / request.weight

    def _estimate_hit(self, sequence: Sequence) -> tuple[int, int]:
        """(blocks found, those of them that nobody references) without walking the whole chain.

        A holder of a block holds its ancestors too, so references form a prefix of the chain.
        """
        if not self.blocks.is_prefix_cache_on:
            return 0, 0
        hashes = self.matchable_hashes(sequence)
        find = self.blocks.prefix_cache.find
        matched = sequence.num_matched
        while matched > 0 and find(hashes[matched - 1]) is None:
            matched -= 1
        while matched < len(hashes) and find(hashes[matched]) is not None:
            matched += 1
        sequence.num_matched = matched
        low, high = 0, matched
        while low < high:
            middle = (low + high) // 2
            block = find(hashes[middle])
            if block is not None and self.blocks.ref_counts[block] > 0:
                low = middle + 1
            else:
                high = middle
        return matched, matched - low

    def matchable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks that a hit may cover: the last token is always computed."""
        num_full = (sequence.num_tokens - 1) // self.blocks.block_size
        return sequence.hash_blocks(num_full, self.blocks.block_size)
