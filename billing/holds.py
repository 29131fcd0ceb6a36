"""Holds: the one writer of a process through which every request's money goes.

The next group is whatever arrived while the last one committed: alone, a request waits for nobody;
under load one commit serves many. On SQLite several writers would starve each other for seconds: one
task writes everything. On PostgreSQL closings have a task of their own, so that nobody waits for
another one's bill before the first token; many would queue for one hot organization's row.
"""

import asyncio
import time
from collections.abc import Sequence
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
from billing.writer_queue import Result, Waiting, WriterQueue
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
Answer = Result | PlatformError


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
        self._settle_patience_s = settle_patience_s
        self._clock = clock
        self._prices = PriceCache()
        # Admissions wait for a place; closings need none: open holds are their limit.
        self._places = asyncio.Semaphore(max_waiting_admits)
        self._openings = WriterQueue(max_group)
        is_shared = self._engine.dialect.name == "sqlite"
        self._closings = self._openings if is_shared else WriterQueue(max_group)
        self._tasks: dict[WriterQueue, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin to take operations."""
        assert not self._tasks, "a writer starts once"
        for queue in dict.fromkeys((self._openings, self._closings)):
            self._tasks[queue] = asyncio.create_task(self._run(queue), name="hold-writer")

    async def stop(self) -> None:
        """Write what has arrived, then end; after ten seconds it is left to the sweeper."""
        try:
            async with asyncio.timeout(STOP_PATIENCE_S):
                # The openings first: those that nobody waits for any more are then closed.
                for queue, task in self._tasks.items():
                    queue.end()
                    await asyncio.shield(task)
        except TimeoutError:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for queue in self._tasks:
            for waiting in queue.clear():
                _fail(waiting.future, LedgerUnavailable("The ledger's writer has stopped."))
        self._tasks.clear()

    async def admit(self, admit: AdmitHold) -> Hold:
        """Reserve credit; less output than asked when less fits, at least one token per choice.

        Raises InsufficientCredit(available=, required=), KeyRevoked, KeyExpired, InvalidKey,
        OrganizationFrozen, HoldConflict, LedgerUnavailable. When the caller is cancelled meanwhile,
        the hold is voided.
        """
        async with self._places:
            future = self._enqueue(self._openings, admit)
            try:
                return cast(Hold, await asyncio.shield(future))
            except asyncio.CancelledError:
                future.add_done_callback(self._void_abandoned)
                raise

    async def extend(
        self, request_id: str, epoch: int, output_tokens: int, *, owner: Owner | None = None
    ) -> Hold:
        """Reserve `output_tokens` in all; raises InsufficientCredit, KeyRevoked, HoldFenced."""
        extend = ExtendHold(request_id, epoch, output_tokens, owner)
        return cast(Hold, await asyncio.shield(self._enqueue(self._openings, extend)))

    async def settle(self, settle: SettleHold) -> Settlement:
        """Charge and close; again, it gives the first answer.

        Goes on when the caller is cancelled, and is tried until the database answers; after
        `settle_patience_s` the caller gets LedgerUnavailable while the trying goes on. Raises
        HoldFenced, HoldExceeded, HoldNotFound.
        """
        return cast(Settlement, await asyncio.shield(self._enqueue(self._closings, settle)))

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
        return cast(Settlement, await asyncio.shield(self._enqueue(self._closings, void)))

    def _enqueue(self, queue: WriterQueue, operation: HoldOperation) -> asyncio.Future[Result]:
        task = self._tasks.get(queue)
        if task is None or task.done():
            raise LedgerUnavailable("The ledger's writer is not running.")
        return queue.add(operation)

    def _void_abandoned(self, future: asyncio.Future[Result]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        hold = cast(Hold, future.result())
        self._enqueue(self._closings, VoidHold(hold.request_id, hold.epoch, "aborted"))

    async def _run(self, queue: WriterQueue) -> None:
        pause_s = FIRST_PAUSE_S
        while not queue.is_over:
            group = await queue.next_group()
            try:
                if group:
                    await self._commit(queue, group)
                pause_s = FIRST_PAUSE_S
            except _Unreachable as unreachable:
                self._postpone(queue, group, unreachable)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except asyncio.CancelledError:
                queue.put_back(group)  # for `stop` to answer
                raise
            # Callers and abandoned admissions react before the writer looks whether it may end.
            await asyncio.sleep(0)

    async def _commit(self, queue: WriterQueue, group: Sequence[Waiting]) -> None:
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
                    await self._commit(queue, [waiting])
                except _Unreachable as unreachable:
                    self._postpone(queue, group[position + 1 :], unreachable)
                    self._postpone(queue, [waiting], unreachable)
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

    def _postpone(
        self, queue: WriterQueue, group: Sequence[Waiting], unreachable: _Unreachable
    ) -> None:
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
                void = VoidHold(waiting.operation.request_id, 1, "platform_fault")
                self._enqueue(self._closings, void)
        queue.put_back(kept)


def _apply(book: HoldBook, operation: HoldOperation) -> Answer:
    try:
        return book.apply(operation)
    except PlatformError as refused:
        return refused


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
