"""Several generations behind one answer: the prompts of one completion request.

Each is queued, held and settled for itself; only what the caller reads is put together.
"""

import asyncio
from dataclasses import dataclass, replace

from api.choices import Piece
from api.errors import ErrorAnswer
from api.shortage import Pause
from api.streaming import Answer
from api.summary import Summary, Timings
from engine.broker.positions import QueuePosition


@dataclass(slots=True)
class _Whole:
    """The one answer, shared by its parts."""

    answer: Answer
    num_open: int
    lock: asyncio.Lock
    summaries: list[Summary]
    is_failed: bool = False


class Part:
    """The answer of one generation, as a part of a whole: its choices come behind the others'."""

    def __init__(self, whole: _Whole, first_choice: int) -> None:
        self._whole = whole
        self._first_choice = first_choice

    @property
    def is_started(self) -> bool:
        """Whether the whole has: then no error can be a status any more."""
        return self._whole.answer.is_started

    @property
    def is_ready(self) -> bool:
        """Never: it waits for its turn."""
        return False

    async def report_queue(self, place: QueuePosition) -> None:
        """Only the first part speaks of the wait."""
        if self._first_choice == 0:
            async with self._whole.lock:
                await self._whole.answer.report_queue(place)

    async def report_pause(self, pause: Pause, choice: int = 0) -> None:
        """Every part may have to wait for credit."""
        async with self._whole.lock:
            if not self._whole.is_failed:
                await self._whole.answer.report_pause(pause, choice + self._first_choice)

    def accept(self) -> None:
        """Completions have no form to compile."""

    def begin(self, num_cached_tokens: int) -> None:
        """Completions have no opening."""

    async def add(self, piece: Piece) -> None:
        """The same piece, in its place among all choices."""
        async with self._whole.lock:
            if not self._whole.is_failed:
                moved = replace(piece, choice=piece.choice + self._first_choice)
                await self._whole.answer.add(moved)

    def add_at_once(self, piece: Piece) -> None:
        """Never reached: it is not ready."""
        raise AssertionError("a part has to wait for its turn")

    async def finish(self, summary: Summary) -> None:
        """The last part to end ends the whole."""
        whole = self._whole
        async with whole.lock:
            whole.summaries.append(summary)
            whole.num_open -= 1
            if not whole.num_open and not whole.is_failed:
                await whole.answer.finish(together(whole.summaries))

    async def fail(self, error: ErrorAnswer) -> None:
        """One part that fails fails the whole, once."""
        async with self._whole.lock:
            if not self._whole.is_failed:
                self._whole.is_failed = True
                await self._whole.answer.fail(error)


def parts_of(answer: Answer, num_parts: int, num_choices: int) -> list[Answer]:
    """`answer` divided among generations of `num_choices` choices each."""
    if num_parts == 1:
        return [answer]
    whole = _Whole(answer, num_parts, asyncio.Lock(), [])
    return [Part(whole, index * num_choices) for index in range(num_parts)]


def together(summaries: list[Summary]) -> Summary:
    """What all parts used; the times are those of the one that began last."""
    last = max(summaries, key=lambda summary: summary.timings.ttft_us or 0)
    return Summary(
        prompt_tokens=sum(summary.prompt_tokens for summary in summaries),
        cached_tokens=sum(summary.cached_tokens for summary in summaries),
        completion_tokens=sum(summary.completion_tokens for summary in summaries),
        num_choices=sum(summary.num_choices for summary in summaries),
        charge_nano_usd=sum(summary.charge_nano_usd for summary in summaries),
        available_nano_usd=min(summary.available_nano_usd for summary in summaries),
        timings=Timings(
            last.timings.ttft_us,
            last.timings.queued_us,
            last.timings.prefill_us,
            draft_tokens=sum(each.timings.draft_tokens or 0 for each in summaries),
            accepted_draft_tokens=sum(
                each.timings.accepted_draft_tokens or 0 for each in summaries
            ),
        ),
        reasoning_tokens=sum(summary.reasoning_tokens for summary in summaries),
        num_prompts=len(summaries),
    )
