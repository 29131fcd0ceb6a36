"""Holds: the one writer of a process through which every request's money goes.

The next group is whatever arrived while the last one committed: alone, a request waits for nobody;
under load one commit serves many. On SQLite several writers would starve each other for seconds,
on PostgreSQL one hot organization's row would be queued for; a single task has neither problem.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from billing.errors import LedgerUnavailable
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
from common.db import Sessions
from common.errors import PlatformError
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
        max_waiting_admits: int = 10_000,
        settle_patience_s: float = 60.0,
        clock: Clock = utc_now_us,
    ) -> None:
        self._engine = beginning_late(sessions)
        self._max_group = max_group
        self._settle_patience_s = settle_patience_s
        self._clock = clock
        self._prices = PriceCache()
        # Admissions wait for a place; closings need none: open holds are their limit.
        self._places = asyncio.Semaphore(max_waiting_admits)
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_passes = 0
        """Turns in a row in which closings had to wait for openings."""

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
        async with self._places:
            future = self._enqueue(admit)
            try:
                return cast(Hold, await asyncio.shield(future))
            except asyncio.CancelledError:
                future.add_done_callback(self._void_abandoned)
                raise

    async def extend(
        self, request_id: str, epoch: int, output_tokens: int, *, owner: Owner | None = None
    ) -> Hold:
        """Reserve `output_tokens` in all; raises InsufficientCredit, KeyRevoked, HoldFenced."""
        return cast(Hold, await self._submit(ExtendHold(request_id, epoch, output_tokens, owner)))

    async def settle(self, settle: SettleHold) -> Settlement:
        """Charge and close; again, it gives the first answer.

        Goes on when the caller is cancelled, and is tried until the database answers; after
        `settle_patience_s` the caller gets LedgerUnavailable while the trying goes on. Raises
        HoldFenced, HoldExceeded, HoldNotFound.
        """
        return cast(Settlement, await self._submit(settle))

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
        return cast(Settlement, await self._submit(void))

    async def _submit(self, operation: HoldOperation) -> Result:
        return await asyncio.shield(self._enqueue(operation))

    def _enqueue(self, operation: HoldOperation) -> asyncio.Future[Result]:
        if self._task is None or self._task.done():
            raise LedgerUnavailable("The ledger's writer is not running.")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # Whoever waited may be gone; an unread failure is not worth a warning.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append(_Waiting(operation, future, time.monotonic()))
        self._arrived.set()
        return future

    def _void_abandoned(self, future: asyncio.Future[Result]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        hold = cast(Hold, future.result())
        self._enqueue(VoidHold(hold.request_id, hold.epoch, "aborted"))

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self._waiting or not self._is_stopping:
            await self._arrived.wait()
            group = self._next_group()
            if not self._waiting and not self._is_stopping:
                self._arrived.clear()
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
            # Callers and abandoned admissions react before the writer looks whether it may end.
            await asyncio.sleep(0)

    def _next_group(self) -> list[_Waiting]:
        """What is committed together: while openings wait, they go without the closings.

        Somebody waits for a first token behind each opening; behind a closing, only for its bill.
        Of one request the opening comes first in any case, so that nothing is overtaken by itself.
        """
        openings = [waiting for waiting in self._waiting if not waiting.is_closing]
        is_mixed = 0 < len(openings) < len(self._waiting)
        if is_mixed and self._num_passes < CLOSINGS_PASSED_OVER:
            self._num_passes += 1
            group = openings[: self._max_group]
            chosen = {id(waiting) for waiting in group}
            self._waiting = deque(one for one in self._waiting if id(one) not in chosen)
            return group
        self._num_passes = 0
        size = min(len(self._waiting), self._max_group)
        return [self._waiting.popleft() for _ in range(size)]

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

    async def _transact(self, operations: list[HoldOperation]) -> list[Answer]:
        """Decide and commit `operations` together; a refused one leaves no trace."""
        is_committing = False
        try:
            async with self._engine.begin() as connection:
                book = await HoldBook.open(connection, operations, self._prices, clock=self._clock)
                answers = [_apply(book, operation) for operation in operations]
                await book.write(connection)
                is_committing = True
        except UNREACHABLE as error:
            raise _Unreachable(is_committing) from error
        return answers

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
