"""Requests whose structure is being compiled, off the step loop and fair to every tenant."""

import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import structlog

from engine.messages import GenerateRequest
from engine.settings import EngineSettings
from engine.structures.compiler import GrammarCompiler
from engine.worker.mailbox import CompiledRequest, Mailbox

logger = structlog.get_logger(__name__)


class FairLine:
    """Requests in line for the compiler: next goes the tenant that has used the least of it.

    So whoever sends one hostile form after another waits for himself.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._lines: dict[str, deque[GenerateRequest]] = {}
        self._used_s: dict[str, float] = {}
        self._is_closed = False

    def put(self, request: GenerateRequest) -> None:
        """Stand in line. Somebody new has used as much as the least of those who wait."""
        with self._arrived:
            if request.tenant not in self._used_s:
                waiting = [self._used_s[tenant] for tenant in self._lines]
                self._used_s[request.tenant] = min(waiting, default=0.0)
            self._lines.setdefault(request.tenant, deque()).append(request)
            self._arrived.notify()

    def get(self) -> GenerateRequest | None:
        """Wait for the next request; None once the line is closed."""
        with self._arrived:
            while not self._lines and not self._is_closed:
                # Nobody waits: nobody is ahead of anybody.
                self._used_s.clear()
                self._arrived.wait()
            if self._is_closed:
                return None
            tenant = min(self._lines, key=self._used_s.__getitem__)
            request = self._lines[tenant].popleft()
            if not self._lines[tenant]:
                del self._lines[tenant]
            return request

    def charge(self, tenant: str, seconds: float) -> None:
        """The compiler has worked so long for `tenant`."""
        with self._arrived:
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + seconds

    def close(self) -> None:
        """No more."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify()


class StructureDesk:
    """Requests whose structure is being compiled, on a thread of its own (`run`).

    `take`, `withdraw` and `finish` are for the engine thread alone.
    """

    def __init__(self, directory: Path, mailbox: Mailbox, settings: EngineSettings) -> None:
        self._compiler = GrammarCompiler(directory, timeout_s=settings.structure_timeout_s)
        self._mailbox = mailbox
        self._line = FairLine()
        self._waiting: dict[str, GenerateRequest] = {}

    def take(self, request: GenerateRequest) -> None:
        """Have the structure of `request` compiled; the mailbox gets it back."""
        self._waiting[request.request_id] = request
        self._line.put(request)

    def finish(self, compiled: CompiledRequest) -> bool:
        """Whether the request is still wanted."""
        request = compiled.request
        if self._waiting.get(request.request_id) is not request:
            return False
        del self._waiting[request.request_id]
        return True

    def withdraw(
        self,
        request_id: str | None = None,
        attempt: int | None = None,
        *,
        nodes: set[str] | None = None,
        model: str | None = None,
    ) -> list[GenerateRequest]:
        """Give up one request up to `attempt`, those of some nodes or of one model, or all that are
        waiting.
        """
        found = [
            request
            for request in self._waiting.values()
            if request_id in (None, request.request_id)
            and (attempt is None or request.attempt <= attempt)
            and (nodes is None or request.node in nodes)
            and (model is None or request.model == model)
        ]
        for request in found:
            del self._waiting[request.request_id]
        return found

    def close(self) -> None:
        """End `run`, and the process behind it."""
        self._line.close()

    def run(self) -> None:
        """Compile what is asked, until closed; a thread's whole life."""
        self._compiler.start()
        while (request := self._line.get()) is not None:
            assert request.structure is not None
            began_s = time.monotonic()
            grammar = None
            try:
                grammar = self._compiler.compile(request.structure)
            except (OSError, msgspec.MsgspecError, RuntimeError) as error:
                # The process next door is gone; the next request starts another.
                logger.error("grammar process failed", error=type(error).__name__)
                self._compiler.stop()
            self._line.charge(request.tenant, time.monotonic() - began_s)
            self._mailbox.order(compiled=[CompiledRequest(request, grammar)])
        self._compiler.stop()
