"""`python -m engine.worker`: one replica of one model.

One thread computes, one talks to Redis, one sleeps on the wake-up list; the main thread waits for
signals. SIGTERM drains: nothing more is taken, what runs may finish within a bound, the rest goes
back to the queue. A second signal ends the process at once.
"""

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog
from redis import Redis

from common import logging as platform_logging
from common.clock import utc_now_us
from common.ids import new_id
from common.settings import CommonSettings
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.engine_thread import EngineThread
from engine.errors import ModelRefused
from engine.io_thread import IoThread
from engine.loading import LoadedEngine, load_engine, num_threads
from engine.mailbox import Mailbox
from engine.messages import Heartbeat, IntegrityReport, WorkerState
from engine.settings import EngineSettings
from engine.structured import StructureDesk
from engine.utilisation import RecentUse
from kernels.cpu import library
from kernels.cpu.memory import keep_freed_memory

logger = structlog.get_logger(__name__)

SOCKET_TIMEOUT_S = 10.0
EXIT_REFUSED = 3
"""The model cannot be hosted; starting again would not help."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which replica of which model this process is."""

    worker: str
    model: str
    path: Path
    revision: str


def main() -> None:
    """Load the model, serve it, drain at SIGTERM."""
    identity = _parse_arguments()
    platform_logging.configure(CommonSettings(), process=identity.worker)
    _die_with_parent()
    keep_freed_memory()
    settings = EngineSettings()
    try:
        _enable_cpu_kernels(settings)
        loaded = load_engine(identity.path, settings)
    except ModelRefused as refusal:
        logger.error("model refused", model=identity.model, reason=refusal.message)
        sys.exit(EXIT_REFUSED)
    logger.info(
        "model loaded",
        model=identity.model,
        dtype=loaded.dtype,
        report=str(loaded.report),
        kv_tokens=loaded.engine.stats.total_kv_tokens,
    )
    serve(identity, loaded, settings)


def serve(identity: Identity, loaded: LoadedEngine, settings: EngineSettings) -> None:
    """Run the threads until a signal has drained the worker."""
    redis_url = CommonSettings().redis_url.get_secret_value()
    redis = Redis.from_url(
        redis_url, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=2.0, retry=None
    )
    broker = WorkerBroker(redis, identity.worker, identity.model, settings=BrokerSettings())
    mailbox = Mailbox(loaded.engine.stats)
    io_thread = IoThread(broker, mailbox, settings, _describer(identity, loaded, mailbox))

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        io_thread.drain()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    # NOTE: Python runs signal handlers in the main thread between two of its instructions. `drain`
    # takes a lock, so no other work may be done here that might hold it.
    failures: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        return lambda: _run_guarded(run, io_thread, failures)

    desk = StructureDesk(identity.path, mailbox, settings)
    engine_thread = threading.Thread(
        target=guarded(EngineThread(loaded.engine, mailbox, desk).run), name="engine", daemon=True
    )
    threading.Thread(target=guarded(desk.run), name="structures", daemon=True).start()
    talker = threading.Thread(target=guarded(io_thread.run), name="io")
    engine_thread.start()
    talker.start()
    while talker.is_alive():
        talker.join(timeout=1.0)
    engine_thread.join(timeout=settings.gap_s * 10)
    desk.close()
    logger.info("worker stopped", model=identity.model)
    if failures:
        sys.exit(1)


def _run_guarded(
    run: Callable[[], None], io_thread: IoThread, failures: list[BaseException]
) -> None:
    """A thread that cannot go on ends the worker; its requests go back to the queue at once."""
    try:
        run()
    except Exception as failure:
        logger.exception("worker thread failed")
        failures.append(failure)
        io_thread.drain(timeout_s=0.0)


def _describer(
    identity: Identity, loaded: LoadedEngine, mailbox: Mailbox
) -> Callable[[WorkerState, IntegrityReport | None], Heartbeat]:
    recent = RecentUse(time.monotonic)

    def describe(state: WorkerState, integrity: IntegrityReport | None) -> Heartbeat:
        stats = mailbox.stats
        return Heartbeat(
            worker=identity.worker,
            model=identity.model,
            revision=identity.revision,
            state=state,
            sent_ms=utc_now_us() // 1_000,
            pid=os.getpid(),
            dtype=loaded.dtype,
            context_length=loaded.engine.context_length,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            free_kv_tokens=stats.free_kv_tokens,
            total_kv_tokens=stats.total_kv_tokens,
            num_steps=stats.num_steps,
            output_tokens_total=stats.output_tokens_total,
            prefill_tokens_total=stats.prefill_tokens_total,
            num_preemptions=stats.num_preemptions,
            cost_model=stats.cost_model,
            utilisation=recent.utilisation(stats),
            load_report=str(loaded.report),
            integrity=integrity,
        )

    return describe


def _enable_cpu_kernels(settings: EngineSettings) -> None:
    """Use the compiled CPU kernels where there are any; plain torch computes otherwise."""
    built = library.build(settings.kernel_cache)
    if built.path is None:
        logger.warning("no compiled CPU kernels", reason=built.reason)
        return
    library.enable(built.path, num_threads(settings))


def _parse_arguments() -> Identity:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="public name")
    parser.add_argument("--path", required=True, type=Path, help="directory of the checkpoint")
    parser.add_argument("--revision", required=True)
    parser.add_argument("--worker", default=None, help="name of this replica")
    arguments = parser.parse_args()
    return Identity(
        worker=arguments.worker or new_id("worker"),
        model=arguments.model,
        path=arguments.path,
        revision=arguments.revision,
    )


def _die_with_parent() -> None:
    """Have the kernel end this process with its supervisor (elsewhere the guardian does it)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)


if __name__ == "__main__":
    main()
