"""What waits to be committed, and which of it is committed together."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from billing.hold_operations import Hold, HoldOperation, SettleHold, Settlement, VoidHold

CLOSINGS_PASSED_OVER = 2
"""Turns in a row; then they are in the next group, whoever else waits."""

Result = Hold | Settlement


@dataclass(slots=True)
class Waiting:
    """An operation in the queue, and who waits for it."""

    operation: HoldOperation
    future: asyncio.Future[Result]
    arrived_at_s: float

    @property
    def is_closing(self) -> bool:
        """Whether it ends a hold: then it is tried until it is done."""
        return isinstance(self.operation, SettleHold | VoidHold)


class WriterQueue:
    """Operations in the order in which they came, for one task that commits them in groups."""

    def __init__(self, max_group: int) -> None:
        self.is_ending = False
        self._max_group = max_group
        self._waiting: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self._num_passes = 0
        """Turns in a row in which closings had to wait for openings."""

    def add(self, operation: HoldOperation) -> asyncio.Future[Result]:
        """Let it wait for its turn."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # Whoever waited may be gone; an unread failure is not worth a warning.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append(Waiting(operation, future, time.monotonic()))
        self._arrived.set()
        return future

    def put_back(self, group: Sequence[Waiting]) -> None:
        """They are the next ones, in the same order."""
        self._waiting.extendleft(reversed(group))
        self._arrived.set()

    def end(self) -> None:
        """Nothing more comes; what is there is still to be committed."""
        self.is_ending = True
        self._arrived.set()

    def clear(self) -> list[Waiting]:
        """Everything that waits, which waits no more."""
        left = list(self._waiting)
        self._waiting.clear()
        return left

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing will."""
        return self.is_ending and not self._waiting

    async def next_group(self) -> list[Waiting]:
        """What is committed together: while openings wait, they go without the closings.

        Somebody waits for a first token behind each opening; behind a closing, only for its bill.
        Of one request the opening comes first in any case, so that nothing is overtaken by itself.
        """
        await self._arrived.wait()
        group = self._take_group()
        if not self._waiting and not self.is_ending:
            self._arrived.clear()
        return group

    def _take_group(self) -> list[Waiting]:
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
