"""The threads of a worker over one engine that the test has made."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.messages import Heartbeat
from engine.settings import EngineSettings
from engine.worker.engine_thread import EngineThread
from engine.worker.io_thread import IoThread
from engine.worker.mailbox import Bells, Mailbox
from engine.worker.model_line import ModelLine
from engine.worker.served_model import ServedModel
from engine.worker.structure_desk import StructureDesk
from engine.worker.turnstile import Turnstile


class WorkerThreads:
    """One model, loaded from the start. `describe` may be replaced."""

    def __init__(
        self, engine: Engine, broker: Any, settings: EngineSettings, **io_options: Any
    ) -> None:
        self.bells = Bells()
        self.mailbox = Mailbox(engine.stats, self.bells)
        self.failures: list[Exception] = []
        self.line = ModelLine(broker, settings, self.bells, self.describe)
        self.io = IoThread(self.bells, settings, [self.line], **io_options)
        self.engine_thread = EngineThread(self.bells, Turnstile(), quantum_s=settings.step_s)
        desk = StructureDesk(Path("none"), self.mailbox, settings)
        self.engine_thread.add(ServedModel("model", engine, self.mailbox, desk))
        self.line.open(self.mailbox)
        self._threads = [self._start(self._compute), self._start(self.io.run)]

    def describe(self, state: Any, integrity: Any) -> Heartbeat:
        return Heartbeat(
            worker="worker-1",
            model="model",
            revision="r1",
            state=state,
            sent_ms=0,
            pid=0,
            dtype="fp32",
            context_length=4096,
            num_running=self.mailbox.stats.num_running,
            integrity=integrity,
        )

    def join(self, timeout_s: float = 30.0) -> None:
        """Wait for a drain that has begun, then end the engine."""
        self._threads[1].join(timeout=timeout_s)
        self.engine_thread.stop()
        for thread in self._threads:
            thread.join(timeout=timeout_s)
            assert not thread.is_alive()

    def stop(self) -> None:
        self.io.drain(timeout_s=0.0)
        self.join()

    def _compute(self) -> None:
        try:
            self.engine_thread.run()
        except RuntimeError as failure:
            self.failures.append(failure)

    @staticmethod
    def _start(run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
