"""Holds: the one writer of a process through which every request's money goes.

The next group is whatever arrived while the last one committed: alone, a request waits for nobody;
under load one commit serves many. What ends a stream, whose text has been sent, may gather for some
milliseconds: the fewer transactions there are, the sooner is the next opening written. On SQLite
several writers would starve each other for seconds, on PostgreSQL one hot organization's row would be
queued for; a single task has neither problem.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from billing.errors import LedgerConflict, LedgerUnavailable
from billing.hold_book import HoldBook, PriceCache
from billing.hold_operations import (
    AdmitHold,
    ExtendHold,
    Hold,
    HoldOperation,
    Outcome,
    Owner,
    SettleHold,
    Settlement,
    UsageFacts,
    VoidHold,
)
from common.clock import Clock, utc_now_us
from common.db import TRUSTED_FOR_S, Sessions
from common.errors import PlatformError
from common.kept_connection import KeptConnection
from common.patience import Patience
from common.round_trip import beginning_late

__all__ = [
    "AdmitHold",
    "ExtendHold",
    "Hold",
    "HoldWriter",
    "Outcome",
    "SettleHold",
    "Settlement",
    "UsageFacts",
    "VoidHold",
]

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout, OSError)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
STOP_PATIENCE_S = 10.0
CLOSINGS_PASSED_OVER = 2
"""Turns in a row; then they are in the next group, whoever else waits."""
DOUBT_S = 2.0
"""So long the books of those are read first who were not as assumed: they have a budget, or little."""
DOUBTED_MAX = 10_000
LOOK_LIMIT = 2_000
"""Of those who wait, for the next group: a crowd of 50,000 must not be gone through for each."""
GATHER_S = 0.02
"""Closings of streams follow one another at this distance."""

Result = Hold | Settlement
Answer = Result | PlatformError


@dataclass(slots=True)
class _Waiting:
    """An operation in the queue, and who waits for it."""

    operation: HoldOperation
    future: asyncio.Future[Result]
    arrived_at_s: float

    @property
    def is_closing(self) -> bool:
        return isinstance(self.operation, SettleHold | VoidHold)

    @property
    def is_patient(self) -> bool:
        """Whether it may gather: its caller has everything but the bill."""
        return isinstance(self.operation, SettleHold) and self.operation.facts.streamed


class _Unreachable(Exception):
    """The database did not answer; `is_unknown` when it was asked to commit."""

    def __init__(self, is_unknown: bool) -> None:
        super().__init__()
        self.is_unknown = is_unknown


class HoldWriter:
    """Owns the transactions that admit, extend, settle and void holds. One per API process."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        max_group: int = 128,
        settle_patience_s: float = 60.0,
        rest_after_s: float = TRUSTED_FOR_S,
        clock: Clock = utc_now_us,
    ) -> None:
        self._kept = KeptConnection(beginning_late(sessions))
        self._max_group = max_group
        self._settle_patience_s = settle_patience_s
        self._clock = clock
        self._prices = PriceCache()
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._rest_after = Patience(rest_after_s)
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_passes = 0
        """Turns in a row in which closings had to wait for openings."""
        self._doubted_until_s: dict[Owner, float] = {}
        self._gather_until_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        """Wakes the writer when what has gathered is due."""

    async def start(self) -> None:
        """Begin to take operations."""
        assert self._task is None, "a writer starts once"
        self._task = asyncio.create_task(self._run(), name="hold-writer")

    async def stop(self) -> None:
        """Write what has arrived, then end; after ten seconds it is left to the sweeper."""
        if self._task is None:
            return
        self._is_stopping = True
        self._arrived.set()
        try:
            await asyncio.wait_for(asyncio.shield(self._task), STOP_PATIENCE_S)
        except TimeoutError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for waiting in self._waiting:
            _fail(waiting.future, LedgerUnavailable("The ledger's writer has stopped."))
        self._waiting.clear()
        self._task = None

    async def admit(self, admit: AdmitHold) -> Hold:
        """Reserve credit; less output than asked when less fits, at least one token per choice.

        Raises InsufficientCredit(available=, required=), KeyRevoked, KeyExpired, InvalidKey,
        OrganizationFrozen, HoldConflict, LedgerUnavailable. When the caller is cancelled meanwhile,
        the hold is voided.
        """
        admitting = self.begin(admit)
        try:
            return await admitting
        except asyncio.CancelledError:
            self.abandon(admitting)
            raise

    def begin(self, admit: AdmitHold) -> "asyncio.Future[Hold]":
        """`admit` for a caller with something to do meanwhile: it takes the answer or abandons it."""
        return cast("asyncio.Future[Hold]", self._enqueue(admit))

    def abandon(self, admitting: "asyncio.Future[Hold]") -> None:
        """Void what `begin` has led to, or will."""
        admitting.cancel()
        # Where the answer comes later, `_commit` finds nobody who waits for it.
        if not admitting.cancelled() and admitting.exception() is None:
            self._void_abandoned(admitting.result())

    async def extend(
        self, request_id: str, epoch: int, output_tokens: int, *, owner: Owner | None = None
    ) -> Hold:
        """Reserve `output_tokens` in all; raises InsufficientCredit, KeyRevoked, HoldFenced."""
        return cast(Hold, await self._enqueue(ExtendHold(request_id, epoch, output_tokens, owner)))

    async def settle(self, settle: SettleHold) -> Settlement:
        """Charge and close; again, it gives the first answer.

        Goes on when the caller is cancelled, and is tried until the database answers; after
        `settle_patience_s` the caller gets LedgerUnavailable while the trying goes on. Raises
        HoldFenced, HoldExceeded, HoldNotFound.
        """
        return cast(Settlement, await self._enqueue(settle))

    async def void(
        self,
        request_id: str,
        epoch: int,
        outcome: Outcome,
        facts: UsageFacts | None = None,
        *,
        owner: Owner | None = None,
    ) -> Settlement:
        """Close without a charge; as persistent as `settle`. Raises HoldFenced, HoldNotFound."""
        void = VoidHold(request_id, epoch, outcome, facts or UsageFacts(), owner=owner)
        return cast(Settlement, await self._enqueue(void))

    def _enqueue(self, operation: HoldOperation) -> asyncio.Future[Result]:
        """Have it written, whether or not somebody still waits for the answer by then."""
        if self._task is None or self._task.done():
            raise LedgerUnavailable("The ledger's writer is not running.")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # Whoever waited may be gone; an unread failure is not worth a warning.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append(_Waiting(operation, future, time.monotonic()))
        self._arrived.set()
        return future

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._waiting or not self._is_stopping:
                await self._arrival()
                group = self._next_group()
                self._rest()
                try:
                    if group:
                        await self._commit(group)
                    pause_s = FIRST_PAUSE_S
                except _Unreachable as unreachable:
                    self._postpone(group, unreachable)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                except asyncio.CancelledError:
                    self._waiting.extendleft(reversed(group))  # for `stop` to answer
                    raise
                # Callers react before the writer goes on, or looks whether it may end.
                await asyncio.sleep(0)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            await self._kept.give_back()

    async def _arrival(self) -> None:
        """Until there is something to do; whoever rests for long needs no connection."""
        if self._kept.is_held and not self._arrived.is_set():
            with suppress(TimeoutError), self._rest_after:
                await self._arrived.wait()
            if not self._arrived.is_set():
                await self._kept.give_back()
        await self._arrived.wait()

    def _next_group(self) -> list[_Waiting]:
        """What is committed together: while openings wait, they go without the closings.

        Somebody waits for a first token behind each opening; behind a closing, only for its bill.
        Of one request the opening comes first in any case, so that nothing is overtaken by itself.
        """
        now_s = time.monotonic()
        is_gathering = now_s < self._gather_until_s and not self._is_stopping
        first = [self._waiting.popleft() for _ in range(min(len(self._waiting), LOOK_LIMIT))]
        ready = [one for one in first if not (is_gathering and one.is_patient)]
        openings = [waiting for waiting in ready if not waiting.is_closing]
        is_mixed = 0 < len(openings) < len(ready)
        if is_mixed and self._num_passes < CLOSINGS_PASSED_OVER:
            self._num_passes += 1
            ready = openings
        else:
            self._num_passes = 0
        group = ready[: self._max_group]
        if any(waiting.is_patient for waiting in group):
            self._gather_until_s = now_s + GATHER_S
        chosen = {id(waiting) for waiting in group}
        self._waiting.extendleft(one for one in reversed(first) if id(one) not in chosen)
        return group

    def _rest(self) -> None:
        """Sleep until something arrives, unless something has; what gathers wakes the writer in time."""
        if self._is_stopping or not all(waiting.is_patient for waiting in self._waiting):
            return
        self._arrived.clear()
        if self._waiting and self._alarm is None:
            delay_s = max(0.0, self._gather_until_s - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._alarm, self._gather_until_s = None, 0.0
        self._arrived.set()

    async def _commit(self, group: Sequence[_Waiting]) -> None:
        """Write a group; when the group fails as a whole, each member alone."""
        try:
            answers = await self._transact([waiting.operation for waiting in group])
        except _Unreachable:
            raise
        except Exception as error:
            # One member must not take the others down.
            if len(group) == 1:
                _fail(group[0].future, error)
                return
            for position, waiting in enumerate(group):
                try:
                    await self._commit([waiting])
                except _Unreachable as unreachable:
                    self._postpone(group[position + 1 :], unreachable)
                    self._postpone([waiting], unreachable)
                    return
            return
        for waiting, answer in zip(group, answers, strict=True):
            if isinstance(answer, PlatformError):
                _fail(waiting.future, answer)
            elif not waiting.future.done():
                waiting.future.set_result(answer)
            elif isinstance(waiting.operation, AdmitHold) and waiting.future.cancelled():
                self._void_abandoned(cast(Hold, answer))

    def _void_abandoned(self, hold: Hold) -> None:
        """Its caller is gone; a writer that has stopped leaves it to the sweeper."""
        with suppress(LedgerUnavailable):
            self._enqueue(VoidHold(hold.request_id, hold.epoch, "aborted"))

    async def _transact(self, operations: list[HoldOperation]) -> list[Answer]:
        """Decide and commit `operations` together; a refused one leaves no trace."""
        answers = await self._transact_assuming(operations)
        if answers is not None:
            return answers
        is_committing = False
        try:
            async with self._kept.transaction() as connection:
                book = await HoldBook.open(connection, operations, self._prices, clock=self._clock)
                answers = [_apply(book, operation) for operation in operations]
                is_committing = True
                await book.commit(connection)
        except UNREACHABLE as error:
            raise _Unreachable(is_committing) from error
        return answers

    async def _transact_assuming(self, operations: list[HoldOperation]) -> list[Answer] | None:
        """Commit admissions without a look at the books; None, and nothing done, where they differ."""
        admits = [one for one in operations if isinstance(one, AdmitHold)]
        if len(admits) < len(operations) or any(self._doubts(one.owner) for one in admits):
            return None
        book = HoldBook.assume(admits, self._prices, clock=self._clock)
        if book is None:
            return None
        answers = [_apply(book, admit) for admit in admits]
        try:
            async with self._kept.transaction() as connection:
                await book.commit(connection)
        except UNREACHABLE as error:
            raise _Unreachable(is_unknown=True) from error
        except (LedgerConflict, DBAPIError):
            if len(self._doubted_until_s) > DOUBTED_MAX:
                self._doubted_until_s.clear()
            until_s = time.monotonic() + DOUBT_S
            self._doubted_until_s |= {admit.owner: until_s for admit in admits}
            return None
        return answers

    def _doubts(self, owner: Owner) -> bool:
        return self._doubted_until_s.get(owner, 0.0) > time.monotonic()

    def _postpone(self, group: Sequence[_Waiting], unreachable: _Unreachable) -> None:
        """Keep the closings for the next try; refuse the rest, and void what may have been held."""
        error = LedgerUnavailable("The ledger cannot be reached.")
        kept = []
        for waiting in group:
            if waiting.is_closing:
                kept.append(waiting)
                if time.monotonic() - waiting.arrived_at_s > self._settle_patience_s:
                    _fail(waiting.future, error)
                continue
            _fail(waiting.future, error)
            if unreachable.is_unknown and isinstance(waiting.operation, AdmitHold):
                self._enqueue(VoidHold(waiting.operation.request_id, 1, "platform_fault"))
        self._waiting.extendleft(reversed(kept))
        self._arrived.set()


def _apply(book: HoldBook, operation: HoldOperation) -> Answer:
    try:
        return book.apply(operation)
    except PlatformError as refused:
        return refused


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
