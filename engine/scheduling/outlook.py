"""What the planner sees of the sequences: their keys, their prefix hits, their expected growth."""

import numpy as np
from numpy.typing import NDArray

from engine.memory.block_manager import BlockManager
from engine.messages import CostModel
from engine.scheduling.plan import DecodeState, PlannerState, PrefillState
from engine.scheduling.preemption import MAX_PREEMPTIONS
from engine.scheduling.slots import SlotTable
from engine.scheduling.tenants import TenantShares
from engine.scheduling.waiting import WaitingList
from engine.sequence import NO_SLOT, Sequence

MIN_GROWTH_TOKENS = 64
"""Reserved for a sequence that has already outlived the expected output length."""
EXPECTED_OUTPUT_TOKENS = 256.0
"""Before any request has finished."""
EXPECTATION_RATE = 0.05
"""Weight of one finished request in the running mean of output lengths."""
WINDOW = 32
"""Waiting requests that one plan chooses from: more than a step can start."""
NUM_MATCHED_BEHIND = 4
"""Of those behind the window, so many are looked up in the prefix cache each step, in turns."""
ONE_US = 1e-6


class Outlook:
    """Turns sequences and slot columns into a `PlannerState`. Changes no block and no slot."""

    def __init__(self, blocks: BlockManager, slots: SlotTable) -> None:
        self.blocks = blocks
        self.slots = slots
        self.expected_output_tokens = EXPECTED_OUTPUT_TOKENS

    def match_prefixes(self, waiting: WaitingList, cost_model: CostModel | None) -> None:
        """Look the most urgent requests up in the prefix cache again; a hit makes them cheaper.

        Only those, and a few others in turns: what this takes does not grow with the queue.
        """
        if not self.blocks.is_prefix_cache_on:
            return
        for sequence in waiting.first(WINDOW) + waiting.next_behind(WINDOW, NUM_MATCHED_BEHIND):
            num_matched = sequence.num_matched
            self._match(sequence)
            if sequence.num_matched != num_matched:
                num_cached = sequence.num_matched * self.blocks.block_size
                waiting.rekey(sequence, self._key(sequence, num_cached, cost_model))

    def learn_length(self, num_generated: int) -> None:
        """A request ended by itself after so many tokens: expect the next ones to do alike."""
        error = num_generated - self.expected_output_tokens
        self.expected_output_tokens += EXPECTATION_RATE * error

    def state(
        self,
        prefilling: list[Sequence],
        num_waiting: int,
        decode_slots: NDArray[np.intp],
        *,
        tenants: TenantShares,
        now_us: int,
        cost_model: CostModel | None,
    ) -> PlannerState:
        """Everything that the next plan depends on.

        `prefilling` are the sequences that it may prefill, those admitted first, of all
        `num_waiting` ones only the most urgent.
        """
        admitted = [sequence for sequence in prefilling if sequence.is_admitted]
        forks = sum([sequence.num_choices - 1 for sequence in admitted])
        return PlannerState(
            prefills=[
                self._prefill_state(sequence, tenants, now_us, cost_model)
                for sequence in prefilling
            ],
            decodes=self._decode_state(decode_slots, tenants, now_us),
            num_unstarted=len(admitted) + num_waiting,
            num_free_blocks=self.blocks.num_free,
            num_blocks=self.blocks.num_blocks,
            num_free_slots=self.slots.num_free - forks,
            expected_output_tokens=self.expected_output_tokens,
        )

    def _prefill_state(
        self, sequence: Sequence, tenants: TenantShares, now_us: int, cost_model: CostModel | None
    ) -> PrefillState:
        size = self.blocks.block_size
        request, num_tokens = sequence.request, sequence.num_tokens
        num_choices = sequence.num_choices
        is_admitted = sequence.slot != NO_SLOT
        num_evictable = 0
        if is_admitted:
            num_held, num_computed = len(sequence.block_table), sequence.num_computed
            key = self._key(sequence, num_computed, cost_model)
        else:
            if sequence.num_matched:  # it may have come into the window only now
                self._match(sequence)
                num_evictable = self._num_evictable(sequence)
            num_held, key = sequence.num_matched, sequence.key
            num_computed = num_held * size
        num_generated = num_tokens - len(request.prompt_token_ids)
        num_left = request.max_tokens - num_generated
        growth = self._growth_tokens(sequence, num_generated, num_left)
        num_expected = -(-(num_tokens + growth) // size)
        if num_choices > 1:  # full blocks of the prompt are shared
            num_expected += (num_choices - 1) * (num_expected - num_tokens // size)
        return PrefillState(
            key + sequence.surplus_s,
            sequence.surplus_s,
            num_computed,
            num_tokens - num_computed,
            num_held,
            num_evictable,
            max(0, num_expected - num_held),
            num_choices,
            tenants.num_slots[request.tenant] + num_choices <= tenants.num_kept_slots,
            num_left,
            is_admitted,
            sequence.order,
            (now_us - sequence.added_us) * ONE_US,
        )

    def _decode_state(
        self, decode_slots: NDArray[np.intp], tenants: TenantShares, now_us: int
    ) -> DecodeState:
        slots = self.slots
        size = self.blocks.block_size
        num_tokens = slots.num_tokens[decode_slots]
        num_generated = slots.num_generated[decode_slots]
        num_preemptions = slots.num_preemptions[decode_slots]
        num_held = slots.num_blocks[decode_slots]
        num_new = self.num_new_blocks(decode_slots)
        left = slots.max_tokens[decode_slots] - num_generated
        expected = int(self.expected_output_tokens) - num_generated
        growth = np.minimum(left, np.maximum(expected, MIN_GROWTH_TOKENS))
        if num_preemptions.any():
            growth = np.where(num_preemptions >= MAX_PREEMPTIONS, left, growth)
        num_reserved = -(-(num_tokens + growth) // size) - num_held
        return DecodeState(
            context_lens=num_tokens,
            num_new_blocks=num_new,
            num_held=num_held,
            num_reserved=np.maximum(num_reserved, num_new),
            num_generated=num_generated,
            num_output_left=left,
            num_preemptions=num_preemptions,
            order=slots.order[decode_slots],
            silent_s=(now_us - slots.last_us[decode_slots]).astype(np.float64) * ONE_US,
            ahead_s=(slots.due_us[decode_slots] - now_us).astype(np.float64) * ONE_US,
            is_ahead=tenants.is_ahead(slots.tenant[decode_slots]),
        )

    def num_new_blocks(self, decode_slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """[num_decodes]: 1 where the next token starts a block or writes into a shared one."""
        slots = self.slots
        capacity = slots.num_blocks[decode_slots] * self.blocks.block_size
        is_full = slots.num_tokens[decode_slots] > capacity
        return (is_full | slots.is_last_block_shared[decode_slots]).astype(np.int32)

    def _growth_tokens(self, sequence: Sequence, num_generated: int, num_left: int) -> int:
        """Output tokens that it is expected to add, `num_left` at most."""
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            return num_left
        expected = int(self.expected_output_tokens) - num_generated
        return min(num_left, max(expected, MIN_GROWTH_TOKENS))

    def _key(self, sequence: Sequence, num_computed: int, cost_model: CostModel | None) -> float:
        """The request's key, less the seconds of work that need not be done (again)."""
        request = sequence.request
        if cost_model is None or num_computed == 0:
            return request.key
        return request.key - cost_model.work_s(num_computed) / request.weight

    def _match(self, sequence: Sequence) -> None:
        """Bring `num_matched` up to date from where it was, without walking the whole chain."""
        num_matchable = self._num_matchable(sequence)
        hashes = sequence.block_hashes
        if len(hashes) < num_matchable:
            sequence.hash_blocks(num_matchable, self.blocks.block_size)
        find = self.blocks.prefix_cache.find
        matched = sequence.num_matched
        while matched > 0 and find(hashes[matched - 1]) is None:
            matched -= 1
        while matched < num_matchable and find(hashes[matched]) is not None:
            matched += 1
        sequence.num_matched = matched

    def _num_evictable(self, sequence: Sequence) -> int:
        """Blocks of the hit that nobody references.

        A holder of a block holds its ancestors too, so references form a prefix of the chain.
        """
        hashes = sequence.block_hashes
        find = self.blocks.prefix_cache.find
        low, high = 0, sequence.num_matched
        while low < high:
            middle = (low + high) // 2
            block = find(hashes[middle])
            if block is not None and self.blocks.ref_counts[block] > 0:
                low = middle + 1
            else:
                high = middle
        return sequence.num_matched - low

    def matchable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks that a hit may cover.

        The last token is always computed, and so is what tells the logprobs of the prompt.
        """
        return sequence.hash_blocks(self._num_matchable(sequence), self.blocks.block_size)

    def _num_matchable(self, sequence: Sequence) -> int:
        untold = sequence.prompt_logprobs_from
        num_tokens = sequence.num_tokens if untold is None else untold
        return (num_tokens - 1) // self.blocks.block_size
