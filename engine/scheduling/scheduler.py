"""The sequences of one engine, and what a plan does to them.

The policy, `planner.plan`, decides; this class carries it out: slots, block tables, prefix hits, forks,
preemption, and the release of everything when a sequence ends.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.batch import AdjustedRow, Drafts, ScheduledChunk, StepBatch, build_batch
from engine.memory.block_manager import BlockManager
from engine.messages import CostModel, GenerateRequest
from engine.scheduling.crew import Crew
from engine.scheduling.outlook import WINDOW, Outlook
from engine.scheduling.plan import Chunk, Limits, PlannerState
from engine.scheduling.planner import PlanFunction, plan
from engine.scheduling.recent_use import RecentUse
from engine.scheduling.slots import SlotTable
from engine.scheduling.tenants import TenantShares
from engine.scheduling.waiting import WaitingList
from engine.sequence import NO_SLOT, Sequence
from engine.speculation.speculator import Speculator, StepWithoutDrafts

PROMPT_ROWS_MAX = 256
"""Tokens of one step whose logits are all wanted: 256 rows of 150,000 logits are 154 MB."""


class Scheduler:
    """Owns the sequences, the slots and the KV blocks. Knows no model and no clock."""

    def __init__(
        self,
        blocks: BlockManager,
        slots: SlotTable,
        limits: Limits,
        cost_model: CostModel | None,
        *,
        policy: PlanFunction = plan,
        speculator: Speculator | None = None,
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.limits = limits
        self.cost_model = cost_model
        """What the next plan believes; None where only tokens can be counted."""
        self.policy = policy
        self.speculator = speculator
        """None: every decode computes one token a step."""
        self.outlook = Outlook(blocks, slots)
        self.use = RecentUse()
        self.tenants = TenantShares(limits.num_kept_slots)
        self.num_preemptions = 0
        self.waiting = WaitingList()
        self.paused: list[Sequence] = []
        """Admitted, and between two chunks of their prompt."""
        self.parked: set[Sequence] = set()
        """At their fence: they hold nothing, and wait for nothing but more credit."""
        self.by_slot: list[Sequence | None] = [None] * slots.num_slots
        self._next_order = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold KV blocks."""
        return self.slots.num_slots - self.slots.num_free

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing yet, or nothing any more."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.waiting or self.paused) or bool(self.slots.is_decoding.any())

    @property
    def prefill_key(self) -> float | None:
        """Of the most urgent prompt that is not computed yet; None where there is none."""
        keys = [sequence.place for sequence in (*self.paused, *self.waiting.first(1))]
        return min(keys, default=None)

    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [
            *self.waiting,
            *self.parked,
            *(sequence for sequence in self.by_slot if sequence is not None),
        ]

    def fits(self, request: GenerateRequest, context_length: int) -> bool:
        """Whether the request could run alone on this machine."""
        asked = len(request.prompt_token_ids) + request.max_tokens
        longest = min(asked, context_length)
        spare = 1 if request.num_choices > 1 else 0  # the copy of a forked block
        is_small = self.blocks.blocks_for(longest) + spare <= self.blocks.num_blocks
        return is_small and request.num_choices <= self.slots.num_slots

    def add(self, sequence: Sequence) -> None:
        """Let the sequence wait for its prefill."""
        self.waiting.add(sequence)

    def schedule(self, now_us: int) -> StepBatch:
        """The next step's batch; empty when there is nothing to compute."""
        while True:
            decode_slots = np.flatnonzero(self.slots.may_decode)
            prefilling, state = self.look(decode_slots, now_us)
            step = self.policy(state, self.limits, self.cost_model)
            victims = [prefilling[index] for index in step.preempted_prefills]
            victims += self._in_slots(decode_slots[step.preempted_decodes].tolist())
            chosen = [(prefilling[chunk.index], chunk) for chunk in step.chunks]
            for victim in victims:
                self._preempt(victim)
            batch = self._carry_out(chosen, decode_slots[step.decodes], now_us)
            if not batch.is_empty or not victims:
                return batch

    def look(
        self, decode_slots: NDArray[np.intp], now_us: int
    ) -> tuple[list[Sequence], PlannerState]:
        """What the next plan chooses from, and all that it depends on."""
        self._rank()
        self.outlook.match_prefixes(self.waiting, self.cost_model)
        prefilling = self.paused + self.waiting.first(WINDOW)
        state = self.outlook.state(
            prefilling,
            len(self.waiting),
            decode_slots,
            tenants=self.tenants,
            now_us=now_us,
            cost_model=self.cost_model,
        )
        return prefilling, state

    def _rank(self) -> None:
        """Let the requests of those tenants go first who have used least of the machine."""
        weights = {each.request.tenant: each.request.weight for each in self.paused}
        weights |= self.waiting.weights
        surplus_s = self.use.surplus_s(weights)
        self.tenants.surplus_s = surplus_s
        self.waiting.rank(surplus_s)
        for sequence in self.paused:
            sequence.surplus_s = surplus_s.get(sequence.request.tenant, 0.0)

    @property
    def must_know_tokens(self) -> bool:
        """Whether the next choice of some sequence depends on the tokens before it as such."""
        return bool((self.slots.is_adjusted & self.slots.is_decoding).any())

    def launch(self, batch: StepBatch) -> Crew:
        """The batch is on its way: for the next plan it counts as computed."""
        chunk_slots = [chunk.sequence.slot for chunk in batch.chunks]
        sequences = [chunk.sequence for chunk in batch.chunks]
        sequences += self._in_slots(batch.decode_slots.tolist())
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            if chunk.is_last:
                self.paused.remove(sequence)
            for slot in chunk.sample_slots:
                self.slots.is_decoding[slot] = True
                self.in_slot(slot).num_computed = sequence.num_computed
        self.slots.expect_tokens(batch.sample_slots)
        slots = np.concatenate([np.array(chunk_slots, dtype=np.intp), batch.decode_slots])
        tenures = self.slots.tenures
        return Crew(sequences, slots, tenures[slots], tenures[batch.sample_slots])

    def land(self, batch: StepBatch, crew: Crew) -> NDArray[np.bool_]:
        """The batch is computed: its KV may be found by later requests. [R]: whose slots still hold."""
        size = self.blocks.block_size
        num_chunks = len(batch.chunks)
        is_there: NDArray[np.bool_] = self.slots.tenures[crew.slots] == crew.tenures
        certain_lens = batch.certain_lens
        ends = certain_lens.tolist()
        for chunk, end, stayed in zip(batch.chunks, ends, is_there.tolist(), strict=False):
            if stayed:
                self._name_blocks(chunk.sequence, (end - chunk.num_tokens) // size, end)
        is_full = is_there & (certain_lens % size == 0)
        for index in np.flatnonzero(is_full[num_chunks:]).tolist():
            sequence = crew.sequences[num_chunks + index]
            end = ends[num_chunks + index]
            sequence.num_computed = end
            self._name_blocks(sequence, end // size - 1, end)
        is_held: NDArray[np.bool_] = self.slots.tenures[batch.sample_slots] == crew.sample_tenures
        return is_held

    def crew_of(self, batch: StepBatch, crew: Crew) -> list[Sequence]:
        """All whose tokens the step computes: the crew, and the choices that forked when it left."""
        is_held = self.slots.tenures[batch.sample_slots] == crew.sample_tenures
        return crew.sequences + self._in_slots(batch.sample_slots[is_held].tolist())

    def append(
        self, slots: NDArray[np.intp], tokens: NDArray[np.int64], now_us: int
    ) -> list[Sequence]:
        """The tokens that were computed for the sequences in `slots`, which are returned."""
        pace_us = round(self.limits.pace_s * 1e6)
        self.slots.note_tokens(slots, tokens, now_us=now_us, pace_us=pace_us)
        sequences = self._in_slots(slots.tolist())
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            assert not sequence.is_at_fence, "a token that is not paid for"
            sequence.append(token)
        return sequences

    def accept_drafts(self, sequence: Sequence, tokens: list[int]) -> None:
        """What was guessed has come true: these tokens are said, and their KV is in the cache."""
        first = sequence.num_tokens // self.blocks.block_size
        for token in tokens:
            sequence.append(token)
        sequence.num_computed = sequence.num_tokens
        pace_us = round(self.limits.pace_s * 1e6)
        self.slots.note_drafts(sequence.slot, len(tokens), pace_us=pace_us)
        self._name_blocks(sequence, first, sequence.num_tokens)

    def move_fence(self, sequence: Sequence, authorized_tokens: int) -> None:
        """So many output tokens are paid for by now; what stood at its fence goes on."""
        sequence.authorized_tokens = authorized_tokens
        if sequence.is_admitted:
            self.slots.num_authorized[sequence.slot] = authorized_tokens
        elif sequence in self.parked and not sequence.is_at_fence:
            self.unpark(sequence)

    def park(self, sequence: Sequence) -> None:
        """Its fence is reached: it gives up its slot and blocks, which the prefix cache may keep."""
        self.remove(sequence)
        self.parked.add(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Let it wait for its turn again, with the place that it had."""
        self.parked.remove(sequence)
        sequence.key = sequence.request.key
        sequence.surplus_s = 0.0
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence and give back what it holds."""
        if not sequence.is_admitted:
            if sequence in self.parked:
                self.parked.remove(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        if sequence in self.paused:
            self.paused.remove(sequence)
        self._release(sequence)

    def adjusted(self, batch: StepBatch) -> list[AdjustedRow]:
        """The sample rows whose logits change before a token is chosen, with their sequences."""
        rows = np.flatnonzero(self.slots.is_adjusted[batch.sample_slots]).tolist()
        return [
            AdjustedRow(row, self.in_slot(int(batch.sample_slots[row])), batch.drafts_before(row))
            for row in rows
        ]

    def members(self, batch: StepBatch) -> list[Sequence]:
        """The sequences of a batch that are still there."""
        chunks = [chunk.sequence for chunk in batch.chunks]
        slots = {*batch.decode_slots.tolist(), *batch.sample_slots.tolist()}
        sampled = [sequence for slot in slots if (sequence := self.by_slot[slot]) is not None]
        return chunks + [sequence for sequence in sampled if sequence not in chunks]

    def problems(self) -> list[str]:
        """What is wrong with the ownership of blocks and slots; empty when nothing is."""
        admitted = [sequence for sequence in self.by_slot if sequence is not None]
        found = self.blocks.problems([sequence.block_table for sequence in admitted])
        for sequence in admitted:
            slot = sequence.slot
            row = self.slots.block_tables[slot, : self.slots.num_blocks[slot]].tolist()
            if self.by_slot[slot] is not sequence or row != sequence.block_table:
                found.append(f"slot {slot} does not mirror its sequence")
        if self.tenants.num_slots != Counter(each.request.tenant for each in admitted):
            found.append("slots by tenant do not add up")
        if len(admitted) != self.num_running:
            found.append(f"{self.num_running} slots taken for {len(admitted)} sequences")
        return found

    # carrying out a plan

    def _carry_out(
        self, chosen: list[tuple[Sequence, Chunk]], decodes: NDArray[np.intp], now_us: int
    ) -> StepBatch:
        # All prefix hits are taken before any block is allocated: an allocation may evict one.
        for sequence, _ in chosen:
            if not sequence.is_admitted:
                self._admit(sequence, now_us)
        decodes, copies = self._grow_decodes(decodes)
        chunks = self._schedule_chunks(chosen)
        return build_batch(
            self.slots,
            chunks,
            decodes,
            self._draft(chunks, decodes),
            copies,
            block_size=self.blocks.block_size,
            scheduled_us=now_us,
        )

    def _admit(self, sequence: Sequence, now_us: int) -> None:
        if sequence.order == NO_SLOT:
            sequence.order = self._next_order
            self._next_order += 1
        self.waiting.remove(sequence)
        self.paused.append(sequence)
        self._take_slot(sequence)
        hit = self.blocks.match(self.outlook.matchable_hashes(sequence))
        self.blocks.share(hit)
        self._extend_table(sequence, hit)
        sequence.num_computed = len(hit) * self.blocks.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            sequence.prefill_started_us = now_us

    def _take_slot(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        slot = self.slots.take(sequence.request.sampling, sequence.choice)
        self.tenants.take_slot(tenant)
        sequence.slot = slot
        self.by_slot[slot] = sequence
        self.slots.num_tokens[slot] = sequence.num_tokens
        self.slots.num_generated[slot] = sequence.num_generated
        self.slots.max_tokens[slot] = sequence.request.max_tokens
        self.slots.num_authorized[slot] = sequence.authorized_tokens
        self.slots.num_preemptions[slot] = sequence.num_preemptions
        self.slots.order[slot] = sequence.order
        self.slots.adapter[slot] = sequence.adapter
        self.slots.tenant[slot] = hash(tenant)
        self.slots.is_adjusted[slot] |= sequence.structure is not None

    def _schedule_chunks(self, chosen: list[tuple[Sequence, Chunk]]) -> list[ScheduledChunk]:
        """The planned chunks; those that tell logprobs share `PROMPT_ROWS_MAX` tokens of a step."""
        chunks: list[ScheduledChunk] = []
        num_rows_left = PROMPT_ROWS_MAX
        for sequence, chunk in chosen:
            num_tokens = chunk.num_tokens
            if sequence.prompt_logprobs_from is not None:
                num_tokens = min(num_tokens, num_rows_left)
                num_rows_left -= num_tokens
            if num_tokens and (found := self._schedule_chunk(sequence, num_tokens)) is not None:
                chunks.append(found)
        return chunks

    def _schedule_chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk | None:
        """Allocate the chunk's blocks; None when there are too few, the sequence then pauses."""
        num_tokens = min(num_tokens, sequence.num_remaining)
        end = sequence.num_computed + num_tokens
        grown = self.blocks.allocate(
            max(0, self.blocks.blocks_for(end) - len(sequence.block_table))
        )
        if grown is None:
            return None
        self._extend_table(sequence, grown)
        is_last = end == sequence.num_tokens
        sample_slots = [sequence.slot, *self._fork(sequence)] if is_last else []
        return ScheduledChunk(sequence, num_tokens, is_last, sample_slots)

    def _fork(self, sequence: Sequence) -> list[int]:
        """The slots of the other choices, which share every block of the prompt."""
        is_partial = sequence.num_tokens % self.blocks.block_size != 0
        forks = [sequence.fork(choice) for choice in range(1, sequence.num_choices)]
        sequence.num_choices = 1
        for fork in forks:
            self.blocks.share(fork.block_table)
            self._take_slot(fork)
            self.slots.append_blocks(fork.slot, fork.block_table)
            self.slots.is_last_block_shared[fork.slot] = is_partial
        if forks:
            self.slots.is_last_block_shared[sequence.slot] = is_partial
        return [fork.slot for fork in forks]

    def _grow_decodes(
        self, decodes: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], list[tuple[int, int]]]:
        """Give each decode the block it writes into; those without one sit this step out."""
        copies: list[tuple[int, int]] = []
        left_out: list[int] = []
        for slot in decodes[self.outlook.num_new_blocks(decodes) > 0].tolist():
            sequence = self.in_slot(slot)
            needs_copy = self._needs_copy(sequence)
            num_held = len(sequence.block_table) * self.blocks.block_size
            if not needs_copy and num_held >= self.slots.num_tokens[slot]:
                self.slots.is_last_block_shared[slot] = False
                continue
            fresh = self.blocks.allocate(1)
            if fresh is None:
                left_out.append(slot)
            elif needs_copy:
                copies.append(self._replace_last_block(sequence, fresh[0]))
            else:
                self._extend_table(sequence, fresh)
        return decodes[~np.isin(decodes, left_out)], copies

    def _draft(self, chunks: list[ScheduledChunk], decodes: NDArray[np.intp]) -> Drafts:
        """What the decodes may say beyond their next token, where the step has room for it."""
        if self.speculator is None:
            return Drafts.none(len(decodes))
        step = StepWithoutDrafts(
            chunks,
            context_lens=self.slots.num_tokens[decodes],
            num_waiting=len(self.paused) + len(self.waiting),
            num_tokens_max=self.limits.max_step_tokens,
        )
        if not self.speculator.pays(step):
            return Drafts.none(len(decodes))
        sequences = self._in_slots(decodes.tolist())
        drafts = self.speculator.drafts(sequences, step)
        pairs = zip(sequences, drafts, strict=True)
        return Drafts.of([self._make_room(sequence, draft) for sequence, draft in pairs])

    def _make_room(self, sequence: Sequence, draft: NDArray[np.int32]) -> NDArray[np.int32]:
        """As much of the draft as its blocks hold, and one more that nobody needs."""
        num_held = len(sequence.block_table)
        if self.blocks.blocks_for(sequence.num_tokens + len(draft)) > num_held:
            self._extend_table(sequence, self.blocks.allocate(1) or [])
        held = len(sequence.block_table) * self.blocks.block_size
        return draft[: held - sequence.num_tokens]

    def _needs_copy(self, sequence: Sequence) -> bool:
        is_flagged = bool(self.slots.is_last_block_shared[sequence.slot])
        return is_flagged and self.blocks.is_shared(sequence.block_table[-1])

    def _replace_last_block(self, sequence: Sequence, fresh: int) -> tuple[int, int]:
        """Copy on write: returns (source, destination)."""
        slot = sequence.slot
        shared = sequence.block_table[-1]
        sequence.block_table[-1] = fresh
        self.slots.block_tables[slot, self.slots.num_blocks[slot] - 1] = fresh
        self.slots.is_last_block_shared[slot] = False
        self.blocks.free([shared])
        return shared, fresh

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks back; it will be computed again from its tokens."""
        self.remove(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.key = sequence.request.key
        sequence.surplus_s = 0.0
        self.waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table)
        self.by_slot[sequence.slot] = None
        self.slots.give_back(sequence.slot)
        self.tenants.give_back_slot(sequence.request.tenant)
        sequence.slot = NO_SLOT
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_matched = 0

    def _extend_table(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.block_table += blocks
        self.slots.append_blocks(sequence.slot, blocks)

    def _name_blocks(self, sequence: Sequence, first: int, num_tokens: int) -> None:
        """Name the full blocks of `num_tokens` from index `first` on, for later requests to find."""
        if not self.blocks.is_prefix_cache_on:
            return
        num_full = num_tokens // self.blocks.block_size
        hashes = sequence.hash_blocks(num_full, self.blocks.block_size)
        for index in range(first, num_full):
            self.blocks.name(sequence.block_table[index], hashes[index])

    def in_slot(self, slot: int) -> Sequence:
        """The sequence that holds this slot."""
        sequence = self.by_slot[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def _in_slots(self, slots: Iterable[int]) -> list[Sequence]:
        return [self.in_slot(slot) for slot in slots]
