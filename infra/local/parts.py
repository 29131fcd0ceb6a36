"""One process of the platform under the supervisor: started, logged, stopped, started again.

Each part leads a process group of its own: Ctrl-C in the terminal reaches the supervisor only,
which then drains the parts in order; and whatever a part has forked ends with it.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.logging import redact
from infra.errors import PartFailed
from infra.local.guard import Guard

BACKOFF_S = 0.5
BACKOFF_S_MAX = 30.0
STEADY_S = 60.0
"""A part that ran so long before it ended is started again at once."""
LAST_WORDS_BYTES = 4096

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What to run, and how to end it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    stop_timeout_s: float
    stdin: bytes | None = None
    """Read by the child to its end: configuration that no process list may show."""
    pass_fds: tuple[int, ...] = ()
    final_statuses: frozenset[int] = frozenset()
    """Exit statuses after which starting again would not help."""


class Part:
    """A running part. `wait_forever` keeps it running; `stop` ends it for good."""

    def __init__(self, spec: PartSpec, *, log: Path, guard: Guard, say: Say) -> None:
        self.spec = spec
        self.log = log
        self.num_restarts = 0
        self._guard = guard
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        is_running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and is_running else None

    async def start(self) -> None:
        """Start the process; raises PartFailed when it cannot even be executed."""
        stdin = subprocess.PIPE if self.spec.stdin is not None else subprocess.DEVNULL
        with self.log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.command,
                    env=dict(self.spec.environment),
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=self.spec.pass_fds,
                )
            except OSError as fault:
                raise PartFailed(f"{self.spec.name} cannot be started: {fault}") from fault
        self._guard.add(self._process.pid)
        if self._process.stdin is not None and self.spec.stdin is not None:
            self._process.stdin.write(self.spec.stdin)
            self._process.stdin.close()

    async def wait_forever(self) -> None:
        """Return when the part has been stopped; until then start it again whenever it ends."""
        delay_s = BACKOFF_S
        while True:
            started = time.monotonic()
            status = await self._ended()
            if self._is_stopping:
                return
            if status in self.spec.final_statuses:
                self._say(f"{self.spec.name} gave up: {self.last_words()} · {self.log}")
                return
            if time.monotonic() - started > STEADY_S:
                delay_s = BACKOFF_S
            self._say(
                f"{self.spec.name} ended ({describe(status)}); starting it again in {delay_s:g} s"
                f" · {self.log}"
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, BACKOFF_S_MAX)
            if self._is_stopping:
                return
            self.num_restarts += 1
            await self.start()

    async def fail_when_ended(self) -> None:
        """While the platform starts: raise PartFailed with the part's last words when it ends."""
        status = await self._ended()
        raise PartFailed(
            f"{self.spec.name} ended before it was ready ({describe(status)}):"
            f" {self.last_words()} · all of it: {self.log}"
        )

    async def stop(self) -> bool:
        """SIGTERM, wait for its drain, then SIGKILL. True when it drained by itself."""
        self._is_stopping = True
        if self.pid is None:
            return True
        self._signal_leader(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended(), self.spec.stop_timeout_s)
        except TimeoutError:
            self._say(
                f"{self.spec.name} did not end within {self.spec.stop_timeout_s:.0f} s: killed"
            )
            self.kill()
            await self._ended()
            return False
        return True

    def kill(self) -> None:
        """End the part and all its descendants at once."""
        self._is_stopping = True
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log that says something, without secrets."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        spoken = [line.strip() for line in lines if line.strip()]
        return redact(spoken[-1])[:300] if spoken else "it said nothing"

    async def _ended(self) -> int:
        """Wait for the leader, then end what it left behind in its group."""
        assert self._process is not None
        process = self._process
        status = await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        self._guard.remove(process.pid)
        return status

    def _signal_leader(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left (macOS says EPERM of a group of zombies)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
