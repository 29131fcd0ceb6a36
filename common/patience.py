"""A time limit for something that is awaited again and again, with one timer for many waits.

`asyncio.timeout` arms and disarms a timer each time: 17 us a frame with two of them, more than the
frame itself. Here entering notes the deadline; the timer, once armed, looks at it when it fires.
"""

import asyncio
from types import TracebackType


class Patience:
    """`with patience:` raises TimeoutError where the body waits longer than `seconds`.

    One task uses it, once at a time. Like `asyncio.timeout`, it interrupts by a cancellation of its
    own, and leaves those of others alone.
    """

    __slots__ = ("_deadline", "_has_expired", "_num_cancelling", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancelling = 0
        self._has_expired = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancelling = self._task.cancelling()
        self._deadline = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._look)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self._has_expired:
            return
        self._has_expired = False
        assert task is not None
        if task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def postpone(self) -> None:
        """What is waited for has come in another way: the limit begins anew."""
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    def _look(self) -> None:
        """The timer has fired: too late, not yet, or nobody waits."""
        self._timer = None
        if self._task is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._look)
        else:
            self._has_expired = True
            self._task.cancel()
