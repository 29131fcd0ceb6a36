"""Where each choice stands in its grammar, and what it may not say next."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import xgrammar

from engine.messages import Structure
from engine.structures.compilation import compile_structure, create_compiler
from engine.structures.process import Verdict
from engine.tokenization import Tokenizer
from kernels.cpu.heap import release_freed_memory

SLOW_STEP_S = 0.02
"""Of one sequence's grammar, on the engine's thread; the masks of JSON take less than 2 ms."""
SLOW_STEPS_MAX = 10


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled structure, or why it was refused."""

    structure: Structure
    compiled: xgrammar.CompiledGrammar | None
    refusal: str = ""

    def start(self, emitted: list[int]) -> "StructureState":
        """The state of a choice that has `emitted` tokens already."""
        assert self.compiled is not None
        state = StructureState(xgrammar.GrammarMatcher(self.compiled), self.structure.begins_after)
        for token_id in emitted:
            state.accept(token_id)
        return state


class GrammarMaker:
    """Compiles what was tried without harm; loads the tokenizer for the first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._compiler: xgrammar.GrammarCompiler | None = None

    def make(self, structure: Structure, verdict: Verdict) -> Grammar:
        """The grammar, or its refusal."""
        if verdict.refused is not None:
            return Grammar(structure, None, verdict.refused)
        if self._compiler is None:
            self._compiler = create_compiler(Tokenizer.load(self._directory))
            release_freed_memory()  # of the tokenizer, which is not needed again
        return Grammar(structure, compile_structure(self._compiler, structure))


class StructureState:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, begins_after: int | None) -> None:
        self._matcher = matcher
        self._begins_after = begins_after
        self._num_slow_steps = 0

    @property
    def is_too_slow(self) -> bool:
        """Whether following this grammar holds up the steps of everybody.

        An ambiguous one, such as `(a*)*b`, costs more with every token: 60 ms after 170 of them.
        """
        return self._num_slow_steps >= SLOW_STEPS_MAX

    @property
    def is_slow(self) -> bool:
        """Whether a step of this grammar has ever taken long: it is asked no more than it must be."""
        return self._num_slow_steps > 0

    def fork(self) -> "StructureState":
        """The state of another choice that has the same tokens."""
        return StructureState(self._matcher.fork(), self._begins_after)

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        if self._begins_after is not None:
            if token_id == self._begins_after:
                self._begins_after = None
        elif not self._matcher.is_terminated():
            began_s = time.thread_time()
            is_allowed = self._matcher.accept_token(token_id)
            self._note_time(began_s)
            assert is_allowed, f"token {token_id} breaks the grammar"

    def mask(self, row: torch.Tensor) -> None:
        """row: [vocab] fp32, contiguous. What the grammar forbids now becomes -inf."""
        if self._begins_after is None and not self._matcher.is_terminated():
            bitmask = xgrammar.allocate_token_bitmask(1, len(row))
            began_s = time.thread_time()
            self._matcher.fill_next_token_bitmask(bitmask)
            self._note_time(began_s)
            if num_unused := -len(row) % 32:  # bits that no token has
                # Where all tokens are allowed, xgrammar 0.2.9 takes the first of them for a token,
                # and writes behind the row: into the next one.
                bitmask[0, -1] |= -1 << (32 - num_unused)
            xgrammar.apply_token_bitmask_inplace(row, bitmask[0].to(row.device))

    def mask_ahead(self, rows: list[torch.Tensor], drafts: list[int]) -> None:
        """Mask rows[i] as if drafts[:i] had been accepted. The state is the same afterwards.

        What follows a draft that is forbidden here can never be said, and stays unmasked.
        """
        begins_after = self._begins_after
        num_accepted = 0
        self.mask(rows[0])
        for row, draft in zip(rows[1:], drafts, strict=True):
            if self._begins_after is not None:
                self._begins_after = None if draft == self._begins_after else self._begins_after
            elif not self._matcher.is_terminated():
                if not self._matcher.accept_token(draft):
                    break
                num_accepted += 1
            self.mask(row)
        self._matcher.rollback(num_accepted)
        self._begins_after = begins_after

    def _note_time(self, began_s: float) -> None:
        self._num_slow_steps += time.thread_time() - began_s > SLOW_STEP_S
