"""Python's garbage collector, told when to look, and at what.

By itself it looks at everything that is open again and again: with thousands of streams a collection of
its middle generation took 170 ms, in which nobody got a token. Here it looks ten times a second at what
is new; what is still in use then is set aside, and looked at again when nobody waits. Requests make
hardly any cycles (two objects each, when measured), so that little is there to be found later.
"""

import asyncio
import gc
from collections.abc import Callable

INTERVAL_S = 0.1
QUIET_TICKS = 10
"""So often in a row nobody was there: between two requests of a busy moment nobody is, either."""
SET_ASIDE_IDLE = 50_000
"""Objects set aside, by which it is worth looking at everything once nobody waits."""
SET_ASIDE_MAX = 2_000_000
"""Then everything is looked at, whoever waits: half a second. 9,000 open streams have as many."""


class Collector:
    """Takes the collector over from `start` to `stop`."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._num_kept = 0
        """Objects that were in use when everything was looked at last."""
        self._num_set_aside = 0
        """Since then; those that have ended meanwhile are counted, too."""
        self._num_idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set aside what start-up has made, and collect at our moments from now on."""
        gc.disable()
        self._look_at_everything()
        self._wait()

    def stop(self) -> None:
        """Give the collector back."""
        if self._timer is not None:
            self._timer.cancel()
        gc.unfreeze()
        gc.enable()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self._num_set_aside += gc.get_count()[0]
        gc.collect(0)
        gc.freeze()
        if self._num_set_aside > SET_ASIDE_MAX:
            # Exact, but slow: it counts them one by one.
            self._num_set_aside = gc.get_freeze_count() - self._num_kept
        self._num_idle_ticks = self._num_idle_ticks + 1 if self._is_idle() else 0
        most = SET_ASIDE_IDLE if self._num_idle_ticks >= QUIET_TICKS else SET_ASIDE_MAX
        if self._num_set_aside > most:
            self._look_at_everything()
        self._wait()

    def _look_at_everything(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._num_kept, self._num_set_aside = gc.get_freeze_count(), 0
