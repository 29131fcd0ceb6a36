"""`python -m engine.worker`: owns one device and runs the models that it hosts on it.

One thread computes, one talks to Redis, one loads and unloads models, and one for each loaded model
sleeps on its wake-up list; the main thread waits for signals. SIGTERM drains: nothing more is taken,
what runs may finish within a bound, the rest goes back to the queue. A second signal ends the process
at once.
"""

import argparse
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog
from redis import Redis

from common import logging as platform_logging
from common.ids import new_id
from common.settings import CommonSettings
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.errors import ModelRefused
from engine.settings import EngineSettings
from engine.structures.lean_xgrammar import import_lean
from engine.worker.engine_thread import EngineThread
from engine.worker.hosted import Threads
from engine.worker.hosting import FixedHostings, Hosting, HostingFile
from engine.worker.io_thread import IoThread
from engine.worker.keeper import Hostings, Keeper
from engine.worker.machine import device_of, enable_kernels, with_dtype
from engine.worker.mailbox import Bells
from engine.worker.turnstile import Turnstile
from kernels import tuning
from kernels.cpu.heap import keep_freed_memory

logger = structlog.get_logger(__name__)

SOCKET_TIMEOUT_S = 10.0
EXIT_REFUSED = 3
"""The model cannot be hosted; starting again would not help."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which worker this process is, and what it hosts."""

    worker: str
    hostings: Hostings
    is_one_model: bool
    """The command line names one model: without it the worker is good for nothing."""
    tensor_parallel: int | None = None
    """Processes that share each model; None: as the settings say."""


def main() -> None:
    """Serve what is hosted, drain at SIGTERM."""
    identity = _parse_arguments()
    platform_logging.configure(CommonSettings(), process=identity.worker)
    _die_with_parent()
    keep_freed_memory()
    import_lean()  # before other threads import anything
    settings = EngineSettings()
    if identity.tensor_parallel is not None:
        settings = settings.model_copy(update={"tensor_parallel": identity.tensor_parallel})
    try:
        _enable_cpu_kernels(settings)
        settings = with_dtype(settings)
        tuning.enable(settings.tuning_cache, device_of(settings))
    except ModelRefused as refusal:
        logger.error("worker refused", reason=refusal.message)
        sys.exit(EXIT_REFUSED)
    sys.exit(Worker(identity, settings).serve())


class Worker:
    """The threads of one worker process."""

    def __init__(self, identity: Identity, settings: EngineSettings) -> None:
        self._identity = identity
        self._settings = settings
        self._redis = Redis.from_url(
            CommonSettings().redis_url.get_secret_value(),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=2.0,
            retry=None,
        )
        self._status = 0
        bells, turnstile = Bells(), Turnstile()
        self._engine_thread = EngineThread(bells, turnstile, quantum_s=settings.step_s)
        self._io_thread = IoThread(bells, settings)
        self._keeper = Keeper(
            identity.hostings,
            settings,
            Threads(self._engine_thread, self._io_thread, bells, turnstile, self._start),
            self._connect,
            on_refused=self._note_refused,
        )

    def serve(self) -> int:
        """Run the threads until a signal has drained the worker; the exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        # NOTE: Python runs signal handlers in the main thread between two of its instructions.
        # `drain` takes a lock, so no other work may be done here that might hold it.
        engine = self._start("engine", self._engine_thread.run)
        talker = self._start("io", self._io_thread.run)
        self._start("keeper", self._keeper.run)
        while talker.is_alive():
            talker.join(timeout=1.0)
        self._keeper.stop()
        self._engine_thread.stop()
        engine.join(timeout=self._settings.gap_s * 10)
        logger.info("worker stopped")
        return self._status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._io_thread.drain()

    def _connect(self, model: str) -> WorkerBroker:
        return WorkerBroker(self._redis, self._identity.worker, model, settings=BrokerSettings())

    def _start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=lambda: self._guard(run), name=name, daemon=True)
        thread.start()
        return thread

    def _guard(self, run: Callable[[], None]) -> None:
        """A thread that cannot go on ends the worker; its requests go back to the queue at once."""
        try:
            run()
        except Exception:  # the worker's seam: whatever it is, the requests must go back
            logger.exception("worker thread failed")
            self._status = 1
            self._io_thread.drain(timeout_s=0.0)

    def _note_refused(self, model: str) -> None:
        if self._identity.is_one_model:
            self._status = EXIT_REFUSED
            self._io_thread.drain(timeout_s=0.0)


def _enable_cpu_kernels(settings: EngineSettings) -> None:
    built = enable_kernels(settings)
    if built.path is None:
        logger.warning("no compiled CPU kernels", reason=built.reason)


def _parse_arguments() -> Identity:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="JSON file that lists name, path, revision")
    parser.add_argument("--model", help="public name of the only model")
    parser.add_argument("--path", type=Path, help="directory of its checkpoint")
    parser.add_argument("--revision", default="")
    parser.add_argument("--worker", default=None, help="name of this worker")
    parser.add_argument("--tensor-parallel", type=int, help="processes that share each model")
    arguments = parser.parse_args()
    worker, ranks = arguments.worker or new_id("worker"), arguments.tensor_parallel
    if ranks is not None and ranks < 1:
        parser.error("--tensor-parallel takes a number from 1 on")
    if arguments.models is not None:
        return Identity(worker, HostingFile(arguments.models), False, ranks)
    if arguments.model is None or arguments.path is None:
        parser.error("give --models, or --model and --path")
    hosting = Hosting(arguments.model, str(arguments.path), arguments.revision)
    return Identity(worker, FixedHostings([hosting]), True, ranks)


def _die_with_parent() -> None:
    """Have the kernel end this process with its supervisor (elsewhere the guardian does it)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)


if __name__ == "__main__":
    main()
