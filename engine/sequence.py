"""One choice of one request: its tokens, and how far its KV is computed.

waiting ──admit──► prefilling (may pause between chunks) ──last chunk──► decoding ──► finished
   ▲                        │                                              │
   └────────────────────────┴───────────────── preempt ────────────────────┤
   └──────────────────────────── extend ──── parked ◄──── at the fence ────┘

A preempted or parked sequence keeps its output; its tokens are computed again as if all were prompt,
but for what the prefix cache still has of them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.memory.prefix_cache import extend_hash, root_hash
from engine.messages import GenerateRequest
from engine.scheduling.waits import Waited
from engine.speculation.draft_history import DraftHistory

if TYPE_CHECKING:  # the grammar engine takes seconds to import; only workers need it
    from engine.structures.grammar import StructureState

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one sequence; owned by the scheduler."""

    request: GenerateRequest
    choice: int
    token_ids: NDArray[np.int32]
    """A buffer; the first `num_tokens` count: prompt, then output."""
    num_tokens: int
    authorized_tokens: int
    """The fence: output tokens that are paid for by now."""
    adapter: int = 0
    """The number of the adapter that changes the model for it; 0 for none."""
    num_choices: int = 1
    """More than one until the prompt is computed and the sequence forks."""
    num_computed: int = 0
    """Tokens whose KV is in the cache."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    key: float = 0.0
    """The request's key, less the work that need not be done."""
    surplus_s: float = 0.0
    """Seconds of the machine that its tenant is ahead of others who wait; see `recent_use`."""
    slot: int = NO_SLOT
    order: int = NO_SLOT
    """When it was first admitted; kept through preemption."""
    num_matched: int = 0
    """Blocks found in the prefix cache while it waits: an estimate until it is admitted."""
    num_cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache at the first admission."""
    num_preemptions: int = 0
    prompt_logprobs_from: int | None = None
    """The next prompt token whose logprob is to be told; None when no more are wanted."""
    structure: "StructureState | None" = None
    """What its grammar allows; None where any text will do."""
    drafts: DraftHistory = field(default_factory=DraftHistory)
    """Guesses of what it would say next, and how they fared."""
    # microseconds of the engine's clocks
    added_us: int = 0
    prefill_started_us: int | None = None
    first_token_us: int | None = None
    queued_us: int = 0
    waited: Waited | None = None
    """How the machine spent that time; known once it is over."""

    @classmethod
    def all_of(
        cls, request: GenerateRequest, added_us: int, *, may_fork: bool = True
    ) -> "list[Sequence]":
        """The sequences of a request that was just taken.

        A new one has all its choices in one sequence until that forks, where the model lets
        sequences share blocks. After a failover each open choice goes on from its own tokens. The
        first one tells the logprobs of the prompt.
        """
        emitted = request.emitted_token_ids or ((),) * request.num_choices
        if may_fork and not request.emitted_token_ids:
            found = [cls._of(request, 0, (), added_us, num_choices=request.num_choices)]
        else:
            found = [
                cls._of(request, choice, token_ids, added_us)
                for choice, token_ids in enumerate(emitted)
                if choice not in request.ended_choices
            ]
        if found and request.sampling.num_prompt_logprobs is not None:
            found[0].note_prompt_told(request.first_prompt_logprob)
        return found

    @classmethod
    def _of(
        cls,
        request: GenerateRequest,
        choice: int,
        emitted: tuple[int, ...],
        added_us: int,
        num_choices: int = 1,
    ) -> "Sequence":
        known = [*request.prompt_token_ids, *emitted]
        return cls(
            request=request,
            choice=choice,
            token_ids=np.array(known, dtype=np.int32),
            num_tokens=len(known),
            authorized_tokens=request.authorized_tokens,
            key=request.key,
            num_choices=num_choices,
            added_us=added_us,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, without those emitted before a failover."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Output tokens, those before a failover included."""
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def is_at_fence(self) -> bool:
        """Whether no further token is paid for yet."""
        return self.num_generated >= self.authorized_tokens

    @property
    def place(self) -> float:
        """Where it stands among those that wait; the least goes first."""
        return self.key + self.surplus_s

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_admitted(self) -> bool:
        """Whether it holds a slot (and blocks)."""
        return self.slot != NO_SLOT

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """The tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    def prompt_logprobs_in(self, num_tokens: int) -> range:
        """The prompt tokens whose logprobs the next `num_tokens` computed ones give.

        What is computed at one position says how likely the token at the next one was.
        """
        if self.prompt_logprobs_from is None:
            return range(0)
        first = max(self.prompt_logprobs_from, self.num_computed + 1)
        return range(first, min(self.num_computed + num_tokens + 1, self.num_prompt_tokens))

    def note_prompt_told(self, position: int) -> None:
        """The logprobs of all prompt tokens before `position` have been told."""
        self.prompt_logprobs_from = position if position < self.num_prompt_tokens else None

    def append(self, token: int) -> None:
        """One more sampled token, when the KV of all others is computed."""
        self.num_computed = self.num_tokens
        if self.num_tokens == len(self.token_ids):
            grown = np.empty(self.num_tokens + max(64, self.num_tokens // 4), dtype=np.int32)
            grown[: self.num_tokens] = self.token_ids
            self.token_ids = grown
        self.token_ids[self.num_tokens] = token
        self.num_tokens += 1

    def hash_blocks(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The hash chain of the first `num_blocks` blocks, computed once each."""
        hashes = self.block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else root_hash(self.request.tenant, self.adapter)
            hashes.append(extend_hash(parent, self.token_ids[start : start + block_size]))
        return hashes[:num_blocks]

    def fork(self, choice: int) -> "Sequence":
        """Another choice over the same computed prompt; the caller shares the blocks."""
        return Sequence(
            request=self.request,
            choice=choice,
            token_ids=self.token_ids.copy(),
            num_tokens=self.num_tokens,
            authorized_tokens=self.authorized_tokens,
            adapter=self.adapter,
            num_computed=self.num_computed,
            block_table=list(self.block_table),
            block_hashes=list(self.block_hashes),
            order=self.order,
            num_cached_tokens=self.num_cached_tokens,
            structure=None if self.structure is None else self.structure.fork(),
            added_us=self.added_us,
            prefill_started_us=self.prefill_started_us,
            queued_us=self.queued_us,
        )
