"""One loaded model on the engine thread: orders in, steps, news out. Knows no Redis."""

import structlog

from engine.engine import Engine, StepOutput
from engine.messages import GenerateRequest, IntegrityReport
from engine.structures.grammar import CompiledRequest
from engine.worker.mailbox import EngineOrders, Mailbox
from engine.worker.structure_desk import StructureDesk

logger = structlog.get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 5
"""After so many failed steps the model is given up."""


class ServedModel:
    """An engine with its mailbox and its desk for structures. For the engine thread alone."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        mailbox: Mailbox,
        desk: StructureDesk,
        *,
        num_torch_threads: int = 0,
    ) -> None:
        self.name = name
        self.num_torch_threads = num_torch_threads
        """What plain torch computes its steps with; 0: whatever is set."""
        self.engine = engine
        self._mailbox = mailbox
        self._desk = desk
        self._num_failures = 0

    def obey(self) -> None:
        """Do what has been ordered since the last call; what is idle now is checked."""
        orders = self._mailbox.take_orders()
        if orders.is_empty:
            return
        self._obey(orders)
        if not self.engine.has_work:
            self._mailbox.tell(self.engine.stats)
            self._check_at_idle()

    def step(self) -> None:
        """One step, and its news. Raises what made the last of many steps fail."""
        output = self._step()
        self._mailbox.tell(self.engine.stats, output=output)
        if not self.engine.has_work:
            self._check_at_idle()

    def _obey(self, orders: EngineOrders) -> None:
        engine = self.engine
        for request in orders.requests:
            if request.structure is None:
                engine.add(request)
            else:
                self._desk.take(request)
        for compiled in orders.compiled:
            self._add_compiled(compiled)
        for extension in orders.extensions:
            engine.extend(extension.request_id, extension.authorized_tokens)
        for cancel in orders.cancels:
            self._end_compiling(self._desk.withdraw(cancel.request_id, cancel.attempt))
            engine.cancel(cancel.request_id, cancel.attempt)
        for request_id, attempt in orders.lost.items():
            self._desk.withdraw(request_id, attempt)
            engine.cancel(request_id, attempt, is_silent=True)
        if orders.dead_nodes:
            self._end_compiling(self._desk.withdraw(nodes=orders.dead_nodes))
            engine.cancel_nodes(orders.dead_nodes)
        if orders.is_draining:
            compiling = [request.request_id for request in self._desk.withdraw()]
            self._mailbox.tell(engine.stats, withdrawn=engine.withdraw_waiting() + compiling)
        for check in orders.checks:
            report = IntegrityReport(token=check.token, problems=engine.problems())
            self._mailbox.tell(engine.stats, integrity=report)

    def _add_compiled(self, compiled: CompiledRequest) -> None:
        if not self._desk.finish(compiled):
            return
        grammar = compiled.grammar
        if grammar is None:
            reason = "the grammar could not be compiled"
            self.engine.refuse(compiled.request, reason, is_callers_fault=False)
        elif grammar.compiled is None:
            self.engine.refuse(compiled.request, grammar.refusal, is_callers_fault=True)
        else:
            self.engine.add(compiled.request, grammar)

    def _end_compiling(self, requests: list[GenerateRequest]) -> None:
        """Nobody waits for them any more; the queue hears that they have ended."""
        for request in requests:
            self.engine.refuse(request, "cancelled", is_callers_fault=False)

    def _step(self) -> StepOutput:
        """A failing step ends its own requests with an error and no others."""
        try:
            output = self.engine.step()
        except Exception:  # the step loop's seam: its requests end with an error, the loop goes on
            self._num_failures += 1
            logger.exception("step failed", model=self.name, failures=self._num_failures)
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise
            return self.engine.abandon("the worker failed to compute a step")
        self._num_failures = 0
        return output

    def _check_at_idle(self) -> None:
        for problem in self.engine.problems():
            logger.error("integrity", model=self.name, problem=problem)
