"""One user of the device at a time, in the order of arrival.

The engine thread passes for each step, the thread that loads a model for each measurement: streams
then wait for one measurement and not for all of them, and no figure is taken beside a step.
"""

import threading
from collections import deque
from types import TracebackType


class Turnstile:
    """A lock that is fair: `threading.Lock` lets a thread that comes back at once pass again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        """Wait until it is our turn."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the next one pass."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
