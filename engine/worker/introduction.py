"""What a worker says of one of its models: its heartbeats, loaded or not."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import utc_now_us
from engine.costs.utilisation import RecentUse
from engine.messages import CostModel, Heartbeat, IntegrityReport, Utilisation, WorkerState
from engine.output import EngineStats
from engine.worker.hosting import Hosting
from engine.worker.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class _Present:
    """A loaded model, as its heartbeats need it."""

    context_length: int
    mailbox: Mailbox
    recent: RecentUse


class Introduction:
    """Made by the keeper, asked by the I/O thread: what changes is replaced as a whole."""

    def __init__(
        self, worker: str, hosting: Hosting, dtype: str, memory: Callable[[], tuple[int, int]]
    ) -> None:
        self.report = ""
        """How it was loaded, or why it could not be."""
        self._worker = worker
        self._hosting = hosting
        self._dtype = dtype
        self._memory = memory
        """(total, free) bytes of the worker."""
        self._present: _Present | None = None
        self._cost_model: CostModel | None = None
        """Of the last time that it was loaded: requests are priced while they wait for it."""

    def loaded(self, report: str, dtype: str, context_length: int, mailbox: Mailbox) -> None:
        """From now on the engine's own figures are told."""
        self.report = report
        self._dtype = dtype
        self._present = _Present(context_length, mailbox, RecentUse(time.monotonic))

    def unloaded(self) -> None:
        """Only what does not take memory is still known."""
        if self._present is not None:
            self._cost_model = self._present.mailbox.stats.cost_model
        self._present = None

    def describe(self, state: WorkerState, integrity: IntegrityReport | None) -> Heartbeat:
        """The heartbeat of this moment."""
        present = self._present
        total_bytes, free_bytes = self._memory()
        stats = present.mailbox.stats if present else EngineStats(cost_model=self._cost_model)
        return Heartbeat(
            worker=self._worker,
            model=self._hosting.name,
            revision=self._hosting.revision,
            state=state,
            sent_ms=utc_now_us() // 1_000,
            pid=os.getpid(),
            dtype=self._dtype,
            context_length=present.context_length if present else 0,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            free_kv_tokens=stats.free_kv_tokens,
            total_kv_tokens=stats.total_kv_tokens,
            num_steps=stats.num_steps,
            output_tokens_total=stats.output_tokens_total,
            prefill_tokens_total=stats.prefill_tokens_total,
            num_preemptions=stats.num_preemptions,
            num_drafts=stats.num_drafts,
            num_accepted_drafts=stats.num_accepted_drafts,
            cost_model=stats.cost_model,
            utilisation=present.recent.utilisation(stats) if present else Utilisation(),
            load_report=self.report,
            memory_total_bytes=total_bytes,
            memory_free_bytes=free_bytes,
            integrity=integrity,
        )
