"""The admitted sequences as columns of numbers, one row (slot) each.

A step touches hundreds of sequences; what it needs of them is gathered by numpy from these
columns, so that no Python runs per sequence before the forward pass.
"""

import numpy as np
from numpy.typing import NDArray

from engine.messages import Sampling

SEED_OF_CHOICE = 0x9E3779B97F4A7C15
"""Odd, so that the choices of one request draw from different streams."""


class SlotTable:
    """Columns over `num_slots` rows; `block_tables`: [num_slots, max_blocks], int32."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.is_decoding = np.zeros(num_slots, dtype=bool)
        self.tenures = np.zeros(num_slots, dtype=np.int64)
        """How often each slot was given back: whoever remembers it can tell whether it still holds."""
        # what is computed
        self.last_token = np.zeros(num_slots, dtype=np.int32)
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        """Prompt and output: the context of the next step. Includes a token that is being computed."""
        self.num_blocks = np.zeros(num_slots, dtype=np.int32)
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.is_last_block_shared = np.zeros(num_slots, dtype=bool)
        """After a fork: the block must be copied before the next token is written."""
        self.adapter = np.zeros(num_slots, dtype=np.int32)
        """0 for none."""
        # what may still come
        self.num_generated = np.zeros(num_slots, dtype=np.int32)
        """Output tokens, those included that are still being computed."""
        self.max_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_authorized = np.zeros(num_slots, dtype=np.int32)
        """The fence: output tokens that are paid for by now."""
        self.num_preemptions = np.zeros(num_slots, dtype=np.int32)
        self.order = np.zeros(num_slots, dtype=np.int64)
        """When it was first admitted; the lowest is never preempted."""
        self.tenant = np.zeros(num_slots, dtype=np.int64)
        """The hash of its tenant's name."""
        # how a stream flows, in microseconds of the engine's clock
        self.last_us = np.zeros(num_slots, dtype=np.int64)
        """When its last token was sampled."""
        self.due_us = np.zeros(num_slots, dtype=np.int64)
        """When its next token is late by its pace; 0 before the first one."""
        # how to choose
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int32)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.seed = np.zeros(num_slots, dtype=np.int64)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int32)
        """-1: none wanted."""
        self.is_adjusted = np.zeros(num_slots, dtype=bool)
        """Penalties, biases or a minimum length change the logits before sampling."""

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def may_decode(self) -> NDArray[np.bool_]:
        """Which of them may compute one more token: none that reaches its fence or limit by what is
        on its way."""
        num_allowed = np.minimum(self.max_tokens, self.num_authorized)
        return self.is_decoding & (self.num_generated < num_allowed)

    def take(self, sampling: Sampling, choice: int) -> int:
        """A free slot, with the columns that never change for a sequence filled in."""
        slot = self._free.pop()
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = signed_64(sampling.seed + choice * SEED_OF_CHOICE)
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.is_adjusted[slot] = changes_logits(sampling)
        self.is_last_block_shared[slot] = False
        self.num_blocks[slot] = 0
        self.due_us[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """Free the slot."""
        self.is_decoding[slot] = False
        self.num_blocks[slot] = 0
        self.tenures[slot] += 1
        self._free.append(slot)

    def first_blocks(self) -> list[int]:
        """The first block of every sequence that holds any."""
        blocks: list[int] = self.block_tables[self.num_blocks > 0, 0].tolist()
        return blocks

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        """Extend the slot's block table."""
        start = self.num_blocks[slot]
        self.block_tables[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] = start + len(blocks)

    def expect_tokens(self, slots: NDArray[np.intp]) -> None:
        """One more token of each of `slots`, no slot twice, is being computed."""
        self.num_tokens[slots] += 1
        self.num_generated[slots] += 1

    def note_tokens(
        self, slots: NDArray[np.intp], tokens: NDArray[np.int64], *, now_us: int, pace_us: int
    ) -> None:
        """The tokens of `slots` that were expected are these."""
        self.last_token[slots] = tokens
        self.last_us[slots] = now_us
        due_us = self.due_us[slots]
        self.due_us[slots] = np.where(due_us == 0, now_us, due_us) + pace_us

    def note_drafts(self, slot: int, count: int, *, pace_us: int) -> None:
        """`count` tokens that were drafted are said, before the one that was sampled with them."""
        self.num_tokens[slot] += count
        self.num_generated[slot] += count
        self.due_us[slot] += count * pace_us


def signed_64(value: int) -> int:
    """The signed 64-bit integer with the same low bits."""
    return (value + 2**63) % 2**64 - 2**63


def changes_logits(sampling: Sampling) -> bool:
    """Whether the logits of this request are adjusted before a token is chosen."""
    return bool(sampling.logit_bias) or has_penalties(sampling) or sampling.min_tokens > 0


def has_penalties(sampling: Sampling) -> bool:
    """Whether what was said already becomes less likely."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )
