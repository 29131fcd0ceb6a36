"""The requests of this process that are not finished, whatever has become of their connections.

A request's work belongs to a task of its own, held here, and never to the task of its HTTP
connection: that one dies with the connection, and a settlement must not die with it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import structlog

from api.errors import ServiceClosing, locations
from billing.hold_operations import Outcome

log = structlog.get_logger()

Result = TypeVar("Result")


class Abortable(Protocol):
    """Work that can be told to stop early; it still closes its books."""

    def abort(self, outcome: Outcome) -> None:
        """Stop soon. `outcome` says why, in the words of `billing.hold_operations`."""


class Running:
    """Owner of the tasks, and the place where shutdown waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._work: set[Abortable] = set()
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._work)

    def require_open(self) -> None:
        """Raise ServiceClosing once shutdown has begun."""
        if self.is_closing:
            raise ServiceClosing("This server is shutting down; another one answers in a moment.")

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` to its end, even if nobody waits for it any more."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def add(self, work: Abortable) -> None:
        """From now on shutdown waits for `work`, and aborts it when it takes too long."""
        self._work.add(work)

    def remove(self, work: Abortable) -> None:
        """`work` has closed its books."""
        self._work.discard(work)

    async def close(self, *, drain_s: float, settle_s: float) -> None:
        """Admit nothing more, let requests finish, then cut the rest and wait for their books."""
        self.is_closing = True
        await self._wait(drain_s)
        for work in list(self._work):
            work.abort("platform_fault")
        await self._wait(settle_s)
        if self._tasks:
            # Their holds are closed by the sweeper once this gateway's lease has expired.
            log.warning("requests_left_to_the_sweeper", count=len(self._tasks))
        for task in list(self._tasks):
            task.cancel()

    async def _wait(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("request_task_failed", error=type(error).__name__, at=locations(error)[-3:])
