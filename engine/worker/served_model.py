"""One loaded model on the engine thread: orders in, steps, news out. Knows no Redis."""

import structlog

from engine.engine import Engine
from engine.errors import RankLost
from engine.messages import GenerateRequest, IntegrityReport
from engine.models.adapters.weights import Adapter
from engine.output import StepOutput
from engine.worker.mailbox import CompiledRequest, EngineOrders, Mailbox
from engine.worker.routes import Routes, of_adapter
from engine.worker.structure_desk import StructureDesk

logger = structlog.get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 5
"""After so many failed steps the model is given up."""


class ServedModel:
    """An engine with its mailboxes and its desk for structures. For the engine thread alone."""

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
        self._mailboxes = {name: mailbox}
        """By the model that is asked for: its own, and those of adapters."""
        self._routes = Routes(name)
        self._desk = desk
        self._num_failures = 0

    def attach(self, model: str, adapter: Adapter, mailbox: Mailbox) -> None:
        """Answer what comes by `mailbox` with an adapter. Raises ModelRefused."""
        self.engine.attach(model, adapter)
        self._mailboxes = self._mailboxes | {model: mailbox}

    def detach(self, model: str) -> None:
        """Forget an adapter with whatever is left of its requests; its line is closed."""
        self._mailboxes = {name: box for name, box in self._mailboxes.items() if name != model}
        self._desk.withdraw(model=model)
        self.engine.detach(model)
        self._routes.forget(model)

    def obey(self) -> None:
        """Do what has been ordered since the last call; what is idle now is checked."""
        has_orders = False
        for model, mailbox in self._mailboxes.items():
            orders = mailbox.take_orders()
            if not orders.is_empty:
                has_orders = True
                self._obey(model, orders)
        if has_orders and not self.engine.has_work:
            self._tell()
            self._check_at_idle()

    def step(self) -> None:
        """One step, and its news. Raises what made the last of many steps fail."""
        self._tell(self._step())
        if not self.engine.has_work:
            self._check_at_idle()

    def _tell(self, output: StepOutput | None = None) -> None:
        """The engine's figures, and to each line the news of its own requests."""
        stats = self.engine.stats
        parts = {self.name: output}
        if output is not None and len(self._mailboxes) > 1:
            parts |= self._routes.split(output, list(self._mailboxes))
        for model, mailbox in self._mailboxes.items():
            told = stats if model == self.name else of_adapter(stats)
            mailbox.tell(told, output=parts.get(model))

    def _obey(self, model: str, orders: EngineOrders) -> None:
        engine, mailbox = self.engine, self._mailboxes[model]
        for request in orders.requests:
            self._routes.note(request.request_id, model)
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
        for ended in orders.ended_choices:
            engine.end_choice(ended.request_id, ended.choice)
        for request_id, attempt in orders.lost.items():
            self._desk.withdraw(request_id, attempt)
            engine.cancel(request_id, attempt, is_silent=True)
        if orders.dead_nodes:
            self._end_compiling(self._desk.withdraw(nodes=orders.dead_nodes))
            engine.cancel_nodes(orders.dead_nodes)
        if orders.is_draining:
            compiling = [each.request_id for each in self._desk.withdraw(model=model)]
            mailbox.tell(engine.stats, withdrawn=engine.withdraw_waiting(model) + compiling)
        for check in orders.checks:
            report = IntegrityReport(token=check.token, problems=engine.problems())
            mailbox.tell(engine.stats, integrity=report)

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
        """A failing step ends its own requests with an error and no others.

        Raises RankLost: nothing is wrong with the requests, and other workers may go on with them.
        """
        try:
            output = self.engine.step()
        except RankLost:
            raise
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
