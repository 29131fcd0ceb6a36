"""The worker's keeper: which models are loaded, and everything that is slow about it.

A thread of its own, so that a model is loaded while the others run. What it decides, `residency`
says; what a model may take, `memory_budget`. One that cannot be loaded is reported and left out.
"""

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

import structlog

from engine.broker.worker import WorkerBroker
from engine.errors import ModelRefused
from engine.memory.footprint import read_adapter_footprint, read_footprint
from engine.memory.memory_budget import MemoryBudget, give_memory_back, usable_bytes
from engine.memory.residency import Absent, Decision, Resident, decide
from engine.settings import EngineSettings
from engine.worker.attaching import BaseAbsent, attach, detach, refuse_without_base
from engine.worker.hosted import Hosted, Loaded, Threads
from engine.worker.hosting import Hosting
from engine.worker.introduction import Introduction
from engine.worker.loading import LoadedEngine, load_engine
from engine.worker.machine import device_of
from engine.worker.mailbox import Mailbox
from engine.worker.model_line import ModelLine
from engine.worker.served_model import ServedModel
from engine.worker.structure_desk import StructureDesk

logger = structlog.get_logger(__name__)

POLL_S = 0.5
"""How often the file of hostings is looked at, and whether somebody has been idle for long."""
RETRY_S = 30.0
"""After a fault that may pass, such as a lack of memory."""
BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp8": 1}


class Hostings(Protocol):
    """What says which models are to be hosted."""

    def changed(self) -> list[Hosting] | None:
        """All of them when they may have changed since the last call, else None."""


class Keeper:
    """Hosts what it is told to. `run` is the thread's whole life."""

    def __init__(
        self,
        hostings: Hostings,
        settings: EngineSettings,
        threads: Threads,
        connect: Callable[[str], WorkerBroker],
        *,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        self._hostings = hostings
        self._settings = settings
        self._threads = threads
        self._connect = connect
        self._on_refused = on_refused or (lambda name: None)
        self._device = device_of(settings)
        self._budget = MemoryBudget(usable_bytes(settings, self._device), settings)
        self._models: dict[str, Hosted] = {}
        self._broken: list[str] = []
        self._bell = threading.Event()
        self._is_stopping = False
        threads.engine.on_broken = self.note_broken

    def run(self) -> None:
        """Follow the hostings and their use until stopped."""
        while not self._is_stopping:
            hostings = self._hostings.changed()
            if hostings is not None:
                self._follow({hosting.name: hosting for hosting in hostings})
            while self._broken:
                self._bury(self._models[self._broken.pop()])
            self._attach_those_that_can()
            decision = self._decide()
            if decision.unload is not None:
                self._unload(self._models[decision.unload])
            elif decision.load is not None:
                self._load(self._models[decision.load])
            else:
                self._bell.wait(POLL_S)
                self._bell.clear()

    def stop(self) -> None:
        """End `run` as soon as possible; what is loaded stays loaded."""
        self._is_stopping = True
        self._bell.set()

    def note_broken(self, name: str) -> None:
        """The engine thread has given the model up."""
        self._broken.append(name)
        self._bell.set()

    # what is hosted

    def _follow(self, wanted: dict[str, Hosting]) -> None:
        for name in list(self._models):
            if wanted.get(name) != self._models[name].hosting:
                self._let_go(self._models.pop(name))
        for name, hosting in wanted.items():
            if name not in self._models:
                self._models[name] = self._take_on(hosting)

    def _take_on(self, hosting: Hosting) -> Hosted:
        broker = self._connect(hosting.name)
        introduction = Introduction(
            broker.worker,
            hosting,
            self._settings.dtype,
            lambda: (self._budget.total_bytes, self._budget.free_bytes),
        )
        line = ModelLine(
            broker,
            self._settings,
            self._threads.bells,
            introduction.describe,
            on_wanted=self._bell.set,
        )
        hosted = Hosted(hosting, line, introduction, None)
        try:
            element = BYTES_PER_ELEMENT[self._settings.dtype]
            if hosting.base:
                hosted.footprint = read_adapter_footprint(hosting.directory, element)
            else:
                hosted.footprint = read_footprint(
                    hosting.directory,
                    element,
                    bytes_per_kv_element=BYTES_PER_ELEMENT.get(self._settings.kv_cache_dtype),
                )
        except ModelRefused as refusal:
            self._fail(hosted, refusal.message, inf)
        except Exception as fault:  # foreign files may fail in any way
            logger.exception("model not read", model=hosting.name)
            self._fail(hosted, f"its files cannot be read: {_reason(fault)}", inf)
        self._threads.io.add(line)
        return hosted

    def _let_go(self, hosted: Hosted) -> None:
        """Nobody hosts it any more: what runs may end."""
        if hosted.loaded is not None:
            self._unload(hosted, is_for_good=True)
        self._detach([hosted], is_for_good=True)
        self._threads.io.remove(hosted.line)

    # what is loaded

    def _decide(self) -> Decision:
        now_s = time.monotonic()
        for hosted in self._models.values():
            if hosted.line.state == "failed" and hosted.retry_at_s <= now_s:
                hosted.line.show("unloaded")
        models = [each for each in self._models.values() if not each.base]
        absents = [self._absent(each, now_s) for each in models if not each.loaded]
        return decide(
            [self._resident(each, now_s) for each in models if each.loaded],
            [absent for absent in absents if absent is not None],
            free_bytes=self._budget.free_bytes,
            idle_unload_s=self._settings.idle_unload_s,
            swap_after_s=self._settings.swap_after_s,
        )

    def _resident(self, hosted: Hosted, now_s: float) -> Resident:
        """A loaded model, used as long as it or one of its adapters is."""
        assert hosted.loaded is not None
        lines = [each.line for each in (hosted, *self._adapters_of(hosted))]
        is_idle = all(line.is_idle for line in lines)
        return Resident(
            hosted.name,
            self._budget.granted(hosted.name).total_bytes,
            now_s - max(line.idle_since_s for line in lines) if is_idle else None,
            now_s - hosted.loaded.since_s,
        )

    def _absent(self, hosted: Hosted, now_s: float) -> Absent | None:
        """A model that could be loaded, for itself or an adapter; None for one that has failed."""
        line = hosted.line
        if hosted.footprint is None or line.state != "unloaded" or not line.is_closed:
            return None
        lines = [line, *(each.line for each in self._adapters_of(hosted))]
        since = [each.wanted_since_s for each in lines if each.wanted_since_s is not None]
        return Absent(
            hosted.name,
            self._budget.needed_bytes(hosted.footprint),
            now_s - min(since) if since else None,
            hosted.is_new,
        )

    def _load(self, hosted: Hosted) -> None:
        """Load it beside what runs; a fault concerns this model alone."""
        hosting, settings = hosted.hosting, self._settings
        assert hosted.footprint is not None
        hosted.is_new = False
        hosted.line.show("loading")
        began_s = time.monotonic()
        is_cpu = self._device.type == "cpu"
        grant = self._budget.grant(hosting.name, hosted.footprint, is_cpu=is_cpu)
        try:
            engine = load_engine(
                hosting.directory,
                settings,
                pool_bytes=grant.pool_bytes,
                alone=self._threads.turnstile,
            )
        except ModelRefused as refusal:
            self._fail(hosted, refusal.message, inf)
        except Exception as fault:  # a foreign model may fail in any way
            logger.exception("model not loaded", model=hosting.name)
            self._fail(hosted, f"loading failed: {_reason(fault)}", time.monotonic() + RETRY_S)
        else:
            give_memory_back(self._device)  # what reading and packing the weights took
            self._serve(hosted, engine)
            seconds = round(time.monotonic() - began_s, 1)
            logger.info(
                "model loaded",
                model=hosting.name,
                seconds=seconds,
                dtype=engine.dtype,
                report=str(engine.report),
                kv_tokens=engine.engine.stats.total_kv_tokens,
            )

    def _serve(self, hosted: Hosted, engine: LoadedEngine) -> None:
        name, threads = hosted.hosting.name, self._threads
        mailbox = Mailbox(engine.engine.stats, threads.bells)
        desk = StructureDesk(hosted.hosting.directory, mailbox, self._settings)
        threads.start("structures", desk.run)
        hosted.loaded = Loaded(engine, desk, time.monotonic())
        hosted.introduction.loaded(
            str(engine.report), engine.dtype, engine.engine.context_length, mailbox
        )
        threads.engine.add(
            ServedModel(
                name, engine.engine, mailbox, desk, num_torch_threads=engine.num_torch_threads
            )
        )
        hosted.line.open(mailbox)

    def _unload(self, hosted: Hosted, *, is_for_good: bool = False) -> None:
        """Let what runs end, give the rest back, and free everything that the model has."""
        self._detach(self._adapters_of(hosted))
        hosted.line.close(self._settings.drain_timeout_s, is_for_good=is_for_good)
        hosted.line.wait_until_closed()
        self._drop(hosted)
        if not is_for_good:
            hosted.line.show("unloaded")
        logger.info("model unloaded", model=hosted.hosting.name)

    def _drop(self, hosted: Hosted) -> None:
        assert hosted.loaded is not None
        self._threads.engine.remove(hosted.hosting.name)
        hosted.loaded.desk.close()
        hosted.loaded = None
        hosted.introduction.unloaded()
        self._budget.take_back(hosted.hosting.name)
        give_memory_back(self._device)

    def _bury(self, hosted: Hosted) -> None:
        """Its steps fail again and again: other workers may try what it had."""
        self._detach(self._adapters_of(hosted), is_at_once=True)
        hosted.line.close(0.0)
        hosted.line.wait_until_closed()
        self._drop(hosted)
        self._fail(hosted, "its steps failed again and again", time.monotonic() + RETRY_S)

    # adapters

    def _attach_those_that_can(self) -> None:
        """Adapters whose base is loaded join it; those whose base will not come say so."""
        for hosted in self._models.values():
            is_waiting = hosted.line.state == "unloaded" and hosted.line.is_closed
            if not hosted.base or hosted.is_attached or not is_waiting:
                continue
            base = self._models.get(hosted.base)
            try:
                refuse_without_base(hosted, base)
                if base is not None and base.loaded is not None:
                    attach(hosted, base, self._threads, self._budget)
            except ModelRefused as refusal:
                self._fail(hosted, refusal.message, inf)
            except BaseAbsent as absence:
                self._fail(hosted, str(absence), time.monotonic() + RETRY_S)
            except Exception as fault:  # a foreign adapter may fail in any way
                logger.exception("adapter not attached", model=hosted.name)
                self._fail(hosted, f"attaching failed: {_reason(fault)}", inf)

    def _detach(
        self, adapters: list[Hosted], *, is_for_good: bool = False, is_at_once: bool = False
    ) -> None:
        detach(
            adapters,
            self._threads,
            self._budget,
            self._settings,
            is_for_good=is_for_good,
            is_at_once=is_at_once,
        )

    def _adapters_of(self, hosted: Hosted) -> list[Hosted]:
        return [each for each in self._models.values() if each.base == hosted.name]

    def _fail(self, hosted: Hosted, reason: str, retry_at_s: float) -> None:
        logger.error("model refused", model=hosted.hosting.name, reason=reason)
        self._budget.take_back(hosted.hosting.name)
        give_memory_back(self._device)
        hosted.retry_at_s = retry_at_s
        hosted.introduction.report = reason
        hosted.line.show("failed")
        if retry_at_s == inf:
            self._on_refused(hosted.hosting.name)


def _reason(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]
