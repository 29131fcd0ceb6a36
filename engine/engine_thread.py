"""The worker's compute loop: orders, one step, news, again. Knows no Redis."""

import structlog

from engine.engine import Engine, StepOutput
from engine.mailbox import EngineOrders, Mailbox
from engine.messages import GenerateRequest, IntegrityReport
from engine.structured import CompiledRequest, StructureDesk

logger = structlog.get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 5
"""After so many failed steps the worker ends, and its supervisor starts another."""


class EngineThread:
    """Runs the engine until it is told to stop. `run` is the thread's whole life."""

    def __init__(self, engine: Engine, mailbox: Mailbox, desk: StructureDesk) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._desk = desk
        self._num_failures = 0

    def run(self) -> None:
        """Steps while there is work, sleeps while there is none.

        Raises RuntimeError when the model fails again and again.
        """
        engine, mailbox = self._engine, self._mailbox
        while True:
            orders = mailbox.take_orders(is_idle=not engine.has_work)
            if orders.is_stopping:
                return
            self._obey(orders)
            if engine.has_work:
                output = self._step()
                mailbox.tell(engine.stats, output=output)
            else:
                mailbox.tell(engine.stats)
                self._check_at_idle()

    def _obey(self, orders: EngineOrders) -> None:
        engine = self._engine
        for request in orders.requests:
            if request.structure is None:
                engine.add(request)
            else:
                self._desk.take(request)
        for compiled in orders.compiled:
            self._add_compiled(compiled)
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
            self._engine.refuse(compiled.request, reason, is_callers_fault=False)
        elif grammar.compiled is None:
            self._engine.refuse(compiled.request, grammar.refusal, is_callers_fault=True)
        else:
            self._engine.add(compiled.request, grammar)

    def _end_compiling(self, requests: list[GenerateRequest]) -> None:
        """Nobody waits for them any more; the queue hears that they have ended."""
        for request in requests:
            self._engine.refuse(request, "cancelled", is_callers_fault=False)

    def _step(self) -> StepOutput:
        """One step; a failing one ends its own requests with an error and no others."""
        try:
            output = self._engine.step()
        except Exception:
            logger.exception("step failed", failures=self._num_failures + 1)
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES_IN_A_ROW:
                raise
            return self._engine.abandon("the worker failed to compute a step")
        self._num_failures = 0
        return output

    def _check_at_idle(self) -> None:
        for problem in self._engine.problems():
            logger.error("integrity", problem=problem)
