"""How many drafts a step computes beside its tokens, and for whom: those that pay, measured.

A draft costs everybody in the step the seconds that it makes it longer; one that is accepted saves
its own stream a step. So drafts are added, the likeliest first, as long as

    P(accepted) * step_s  >  MARGIN * added_s * (streams + requests without a first token)

On a machine that waits for memory a draft is nearly free; one that multiplies without a pause, and
one on which prompts wait, drops them by itself. What steps with drafts really take, beside those
without, corrects the prediction.

Source: prompt lookup decoding; that speculation must yield to load is known from serving systems
(e.g. arXiv 2406.14066).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from engine.batch import ScheduledChunk
from engine.messages import CostModel, StepWork
from engine.sequence import Sequence

LONGEST_DRAFT = 15
LONGEST_DRAFT_IN_FORM = 7
"""Under a grammar every draft takes a mask, on the engine's own thread."""
LEAST_RATE = 0.05
"""No draft is less likely than this, however little it costs: what runs in Python is not predicted."""
MARGIN = 1.5
"""What a draft is worth must exceed what it costs by so much: both are guesses."""
LONGER_MAX = 2.0
"""No step takes more than so many times what it would without drafts: who shares it has none, maybe."""
RATE = 0.1
"""Weight of one step in what steps with and without drafts take: about the last 10 count."""
STALL = 2.0
"""A step further off than this counts as no more: the process was not running."""
OBLIVION = 0.002
"""Part of what drafts were measured to cost that each step without them forgets."""


@dataclass(frozen=True, slots=True)
class StepWithoutDrafts:
    """A step as it is planned: what drafts would make longer."""

    chunks: list[ScheduledChunk]
    context_lens: NDArray[np.int32]
    """[num_decodes]"""
    num_waiting: int
    """Requests without a first token, those of the chunks included."""
    num_tokens_max: int
    """That a step may compute."""

    @property
    def num_decodes(self) -> int:
        """Streams that get a token."""
        return len(self.context_lens)

    @property
    def work(self) -> StepWork:
        """What it computes."""
        decodes = self.decodes_alone
        pairs = [
            chunk.num_tokens * (chunk.sequence.num_computed + chunk.num_tokens / 2)
            for chunk in self.chunks
        ]
        return StepWork(
            num_tokens=decodes.num_tokens + sum([chunk.num_tokens for chunk in self.chunks]),
            num_samples=decodes.num_samples + sum([chunk.is_last for chunk in self.chunks]),
            prefill_pairs=float(sum(pairs)),
            decode_context=decodes.decode_context,
        )

    @property
    def decodes_alone(self) -> StepWork:
        """What its decodes would be without the chunks."""
        context = float(self.context_lens.sum())
        return StepWork(self.num_decodes, num_samples=self.num_decodes, decode_context=context)


class Speculator:
    """Chooses the drafts of one engine's steps, and measures them. Knows no KV cache."""

    def __init__(self, context_length: int) -> None:
        self.cost_model: CostModel | None = None
        """What a step is believed to take; without one nothing is drafted."""
        self.num_drafts = 0
        self.num_accepted = 0
        self._context_length = context_length
        self.overhead = 1.0
        """Seconds of a step with drafts, where those without take what is predicted."""
        self._plain: float | None = None
        """Seconds of decode steps without drafts, by prediction; None before the first."""

    def pays(self, step: StepWithoutDrafts) -> bool:
        """Whether a draft that is surely accepted would be worth what it costs in this step."""
        if self.cost_model is None or step.num_decodes == 0:
            return False
        return _Price(self.cost_model, step, self.overhead).least_rate(1) < 1

    def drafts(
        self, sequences: Items[Sequence], step: StepWithoutDrafts
    ) -> list[NDArray[np.int32]]:
        """For each of the step's decodes the tokens to compute as if they were said; maybe none."""
        assert self.cost_model is not None
        price = _Price(self.cost_model, step, self.overhead)
        least_rate = price.least_rate(1)
        proposals = [self._propose(sequence, least_rate) for sequence in sequences]
        rates = [sequence.drafts.rate for sequence in sequences]
        lengths = _lengths(rates, [len(some) for some in proposals], price, step)
        return [some[:length] for some, length in zip(proposals, lengths, strict=True)]

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What became of a sequence's drafts."""
        sequence.drafts.note(num_drafts, num_accepted)
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def observe(self, work: StepWork, seconds: float, *, has_drafts: bool) -> None:
        """A step of decodes alone took so long."""
        if self.cost_model is None or seconds <= 0:
            return
        ratio = seconds / self.cost_model.step_s(work)
        if self._plain is None:
            self._plain = ratio
        elif has_drafts:
            self.overhead = _follow(self.overhead, ratio / self._plain)
        else:
            self._plain = _follow(self._plain, ratio)
            self.overhead += OBLIVION * (1 - self.overhead)

    def _propose(self, sequence: Sequence, least_rate: float) -> NDArray[np.int32]:
        history = sequence.drafts
        if history.rate <= least_rate:
            history.fade()
            return sequence.token_ids[:0]
        most = min(self._room(sequence), _longest(sequence))
        return history.propose(sequence.token_ids, sequence.num_tokens, most)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that it may say beyond the next one: paid for, asked for, within the context."""
        most = min(sequence.authorized_tokens, sequence.request.max_tokens)
        left = min(most - sequence.num_generated, self._context_length - sequence.num_tokens)
        return left - 1


class _Price:
    """What drafts cost in one step, and what an accepted one is worth."""

    def __init__(self, cost_model: CostModel, step: StepWithoutDrafts, overhead: float) -> None:
        self._cost_model = cost_model
        self._work = step.work
        self._overhead = overhead
        self._num_delayed = step.num_decodes + step.num_waiting
        self._mean_context = self._work.decode_context / step.num_decodes
        self._worth_s = cost_model.step_s(step.decodes_alone)
        """The step that an accepted draft saves its stream."""

    def least_rate(self, num_drafts: int) -> float:
        """How likely the last of so many drafts must be, to be worth what it adds."""
        added_s = self._step_s(num_drafts) - self._step_s(num_drafts - 1)
        cost_s = MARGIN * added_s * self._overhead * self._num_delayed
        return max(LEAST_RATE, cost_s / self._worth_s)

    def is_too_long(self, num_drafts: int) -> bool:
        """Whether the others in the step would notice so many."""
        return self._overhead * self._step_s(num_drafts) > LONGER_MAX * self._step_s(0)

    def is_worth(self, expected: float, num_drafts: int) -> bool:
        """Whether so many accepted ones are worth all that the drafts add."""
        added_s = self._overhead * self._step_s(num_drafts) - self._step_s(0)
        return expected * self._worth_s > added_s * self._num_delayed

    def _step_s(self, num_drafts: int) -> float:
        work = self._work
        return self._cost_model.step_s(
            StepWork(
                work.num_tokens + num_drafts,
                num_samples=work.num_samples + num_drafts,
                prefill_pairs=work.prefill_pairs + num_drafts * self._mean_context,
                decode_context=work.decode_context,
            )
        )


def _longest(sequence: Sequence) -> int:
    if sequence.structure is None:
        return LONGEST_DRAFT
    return 0 if sequence.structure.is_slow else LONGEST_DRAFT_IN_FORM


def _lengths(
    rates: list[float], longest: list[int], price: _Price, step: StepWithoutDrafts
) -> list[int]:
    """How much of each proposal is computed: the likeliest next draft of all, until none pays."""
    lengths = [0] * len(longest)
    next_drafts = [(-rates[index], index) for index, most in enumerate(longest) if most]
    heapify(next_drafts)
    expected = 0.0
    for num_drafts in range(1, step.num_tokens_max - step.work.num_tokens + 1):
        if not next_drafts or -next_drafts[0][0] <= price.least_rate(num_drafts):
            break
        if price.is_too_long(num_drafts):
            break
        probability, index = -next_drafts[0][0], next_drafts[0][1]
        expected += probability
        lengths[index] += 1
        if lengths[index] < longest[index]:
            heapreplace(next_drafts, (-probability * rates[index], index))
        else:
            heappop(next_drafts)
    return lengths if price.is_worth(expected, sum(lengths)) else [0] * len(longest)


def _follow(value: float, ratio: float) -> float:
    bounded = min(max(ratio, value / STALL), value * STALL)
    return value + RATE * (bounded - value)
