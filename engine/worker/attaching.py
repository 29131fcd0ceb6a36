"""Adapters on a worker: attached while their base is loaded, each with a queue of its own.

For the keeper's thread. An adapter comes and goes beside whatever runs: it is read from its files
here, and handed to its base between two steps.
"""

from collections.abc import Callable, Iterable

import structlog

from engine.errors import ModelRefused
from engine.memory.memory_budget import MemoryBudget
from engine.models.adapters.weights import read_adapter
from engine.settings import EngineSettings
from engine.worker.hosted import Hosted, Threads
from engine.worker.mailbox import Mailbox
from engine.worker.served_model import ServedModel

logger = structlog.get_logger(__name__)


class BaseAbsent(Exception):
    """The base of an adapter cannot serve it now; says why."""


def attach(hosted: Hosted, base: Hosted, threads: Threads, budget: MemoryBudget) -> None:
    """Have the loaded `base` answer the adapter's requests. Raises ModelRefused, BaseAbsent."""
    assert base.loaded is not None
    assert hosted.footprint is not None
    if hosted.footprint.weight_bytes > budget.free_bytes:
        raise BaseAbsent("no memory is left for it beside its base")
    hosted.line.show("loading")
    adapter = read_adapter(hosted.hosting.directory)
    loaded = base.loaded.engine
    mailbox = Mailbox(loaded.engine.stats, threads.bells)

    def work(served: ServedModel) -> None:
        served.attach(hosted.name, adapter, mailbox)

    if not threads.engine.between_steps(base.name, work):
        raise BaseAbsent(f"its base {base.name} has just left")
    budget.grant(hosted.name, hosted.footprint, is_cpu=True)
    report = f"adapter of {base.name}, added to the rows of its requests; {loaded.report}"
    hosted.introduction.loaded(report, loaded.dtype, loaded.engine.context_length, mailbox)
    hosted.is_attached = True
    hosted.line.open(mailbox)
    logger.info("adapter attached", model=hosted.name, base=base.name)


def detach(
    adapters: Iterable[Hosted],
    threads: Threads,
    budget: MemoryBudget,
    settings: EngineSettings,
    *,
    is_for_good: bool = False,
    is_at_once: bool = False,
) -> None:
    """Let what runs with these adapters end, all at the same time, and forget them."""
    attached = [hosted for hosted in adapters if hosted.is_attached]
    for hosted in attached:
        timeout_s = 0.0 if is_at_once else settings.drain_timeout_s
        hosted.line.close(timeout_s, is_for_good=is_for_good)
    for hosted in attached:
        hosted.line.wait_until_closed()
        threads.engine.between_steps(hosted.base, _detach(hosted.name))
        hosted.is_attached = False
        hosted.introduction.unloaded()
        budget.take_back(hosted.name)
        if not is_for_good:
            hosted.line.show("unloaded")
        logger.info("adapter detached", model=hosted.name, base=hosted.base)


def _detach(name: str) -> Callable[[ServedModel], None]:
    return lambda served: served.detach(name)


def refuse_without_base(hosted: Hosted, base: Hosted | None) -> None:
    """Raise where the base will not come: ModelRefused, or BaseAbsent where it may come later."""
    if base is None:
        raise BaseAbsent(f"its base {hosted.base} is not hosted here")
    if base.base:
        raise ModelRefused(f"its base {hosted.base} is an adapter itself")
    if base.line.state == "failed":
        raise BaseAbsent(f"its base {hosted.base} cannot be loaded: {base.introduction.report}")
