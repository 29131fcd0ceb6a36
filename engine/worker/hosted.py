"""What the keeper knows of one model that it hosts, and the threads that serve it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.footprint import Footprint
from engine.worker.engine_thread import EngineThread
from engine.worker.hosting import Hosting
from engine.worker.introduction import Introduction
from engine.worker.io_thread import IoThread
from engine.worker.loading import LoadedEngine
from engine.worker.mailbox import Bells
from engine.worker.model_line import ModelLine
from engine.worker.structure_desk import StructureDesk
from engine.worker.turnstile import Turnstile

StartThread = Callable[[str, Callable[[], None]], threading.Thread]
"""Runs something in a thread whose failure ends the worker."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The worker's other threads, and what they share."""

    engine: EngineThread
    io: IoThread
    bells: Bells
    turnstile: Turnstile
    start: StartThread


@dataclass(slots=True)
class Loaded:
    """What unloading has to undo."""

    engine: LoadedEngine
    desk: StructureDesk
    since_s: float


@dataclass(slots=True)
class Hosted:
    """One hosted model on this worker."""

    hosting: Hosting
    line: ModelLine
    introduction: Introduction
    footprint: Footprint | None
    """None where not even the files can be read."""
    loaded: Loaded | None = None
    is_attached: bool = False
    """An adapter that its base, which is loaded, answers with."""
    is_new: bool = True
    retry_at_s: float = 0.0
    """No attempt before this time; never again when infinite."""

    @property
    def name(self) -> str:
        """Its public name."""
        return self.hosting.name

    @property
    def base(self) -> str:
        """The model that it is an adapter of; empty for a model of its own."""
        return self.hosting.base
