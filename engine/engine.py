"""The engine: requests of token ids in, frames of token ids out, one step at a time.

A step is three statements: schedule, run, postprocess. Text, names and money are unknown here.
Not for two threads: the worker's engine thread owns it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from common.clock import Clock, utc_now_us
from engine.batch import StepBatch
from engine.cost_model import key_when_taken
from engine.costs.step_meter import StepMeter, work_of
from engine.errors import ModelRefused
from engine.flight import Flight, Runner
from engine.memory.pool_warmer import PoolWarmer
from engine.messages import CostModel, FinishReason, GenerateRequest, TokenLogprob
from engine.models.model import AdaptableModel
from engine.output import EngineStats, StepOutput
from engine.reporter import Reporter
from engine.sampler import Sampled
from engine.scheduling.assembly import BLOCK_SIZE, create_scheduler
from engine.scheduling.charges import charge_step
from engine.scheduling.planner import PlanFunction, plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waits import WaitLedger
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.speculation.acceptance import Run, runs_of
from engine.speculation.speculator import Speculator

if TYPE_CHECKING:  # only workers load the grammar engine
    from engine.models.adapters.weights import Adapter
    from engine.structures.grammar import Grammar

TOO_AMBIGUOUS = "The required form is too ambiguous to follow any further."


class Engine:
    """Continuous batching over one model. See the module docstring."""

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        num_blocks: int,
        *,
        cost_model: CostModel | None = None,
        policy: PlanFunction = plan,
        warmer: PoolWarmer | None = None,
        waits: WaitLedger | None = None,
        now_us: Callable[[], int] = lambda: time.perf_counter_ns() // 1_000,
        utc_now_us: Clock = utc_now_us,
    ) -> None:
        spec = runner.model.spec
        self.context_length = min(settings.max_context or spec.context_length, spec.context_length)
        self.vocab_size = spec.vocab_size
        self.cost_model = cost_model
        self._runner = runner
        self._may_fork = spec.shares_blocks
        without_hits = settings.model_copy(update={"is_prefix_cache_on": False})
        self._may_draft = settings.is_speculation_on and spec.can_rewind and not runner.is_ahead
        self._settings = settings if spec.shares_blocks else without_hits
        self._num_blocks = num_blocks
        self._policy = policy
        self._warmer = warmer
        self._waits = waits or WaitLedger()
        self._now_us = now_us
        self._reporter = Reporter(self._waits, now_us)
        self._utc_now_us = utc_now_us
        self._speculator = Speculator(self.context_length)
        self._scheduler = self._create_scheduler()
        self._meter = StepMeter(cost_model)
        self._batch: StepBatch | None = None
        self._flights: deque[Flight] = deque()
        """Steps whose results are not known yet: one at most between two calls of `step`."""
        self._landed_us = 0
        self._adapters: dict[str, int] = {}
        """Numbers of the adapters by the models' names that requests ask for."""
        self._num_adapters = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_prefill_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or has something to say."""
        return bool(self._flights) or self._reporter.has_news or self._scheduler.has_work

    @property
    def prefill_key(self) -> float | None:
        """Of the most urgent prompt that is not computed yet; None where there is none."""
        return self._scheduler.prefill_key

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_parked=len({each.request.request_id for each in scheduler.parked}),
            waiting_tenants=frozenset(scheduler.waiting.weights),
            free_kv_tokens=scheduler.blocks.num_free * BLOCK_SIZE,
            total_kv_tokens=scheduler.blocks.num_blocks * BLOCK_SIZE,
            num_steps=self._num_steps,
            output_tokens_total=self._num_output_tokens,
            prefill_tokens_total=self._num_prefill_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_drafts=self._speculator.num_drafts,
            num_accepted_drafts=self._speculator.num_accepted,
            cost_model=self._meter.corrected,
            totals=self._meter.totals,
            prediction_error=self._meter.relative_error,
            is_prediction_trusted=self._meter.is_trusted,
        )

    def attach(self, model: str, adapter: "Adapter") -> None:
        """Answer requests for `model` with this adapter over the model that is loaded.

        Raises ModelRefused. A number is never used again: what the prefix cache keeps of an adapter
        is found by no other one.
        """
        if not isinstance(self._runner.model, AdaptableModel):
            raise ModelRefused("the base is no model that adapters can be added to")
        self._num_adapters += 1
        self._runner.model.attach(self._num_adapters, adapter)
        self._adapters[model] = self._num_adapters

    def detach(self, model: str) -> None:
        """Forget an adapter; what still runs with it ends, and nobody is told."""
        number = self._adapters.pop(model)
        for sequence in self._scheduler.sequences():
            if sequence.adapter == number:
                self._end(sequence, "abort", is_silent=True)
        assert isinstance(self._runner.model, AdaptableModel)
        self._runner.model.detach(number)

    def add(self, request: GenerateRequest, grammar: "Grammar | None" = None) -> None:
        """Let a request wait for its prefill; one that cannot run is answered with an error.

        A request with a structure needs its compiled `grammar`; its API node hears that it has one.
        """
        if self._reporter.has(request.request_id):
            self.cancel(request.request_id, is_silent=True)  # an earlier attempt came back to us
        problem = self._problem_with(request)
        queued_us = max(0, self._utc_now_us() - request.arrival_ms * 1_000)
        key = key_when_taken(request.key, waited_s=queued_us / 1e6)
        room = self.context_length - len(request.prompt_token_ids)
        request = msgspec.structs.replace(
            request, key=key, max_tokens=min(request.max_tokens, room)
        )
        sequences = Sequence.all_of(request, self._now_us(), may_fork=self._may_fork)
        self._reporter.open(request, sum(each.num_choices for each in sequences))
        for sequence in sequences:
            sequence.adapter = self._adapters.get(request.model, 0)
            sequence.queued_us = queued_us
            if problem is not None:
                self._end(sequence, "error", error=problem)
            elif sequence.num_generated >= request.max_tokens:
                self._end(sequence, "length")
            else:
                if grammar is not None:
                    sequence.structure = grammar.start(sequence.output_token_ids.tolist())
                    self._reporter.accept_form(sequence)
                wait = self._scheduler.park if sequence.is_at_fence else self._scheduler.add
                wait(sequence)

    def extend(self, request_id: str, authorized_tokens: int) -> None:
        """Move a request's fence; what stood at it goes on. A lower fence changes nothing."""
        for sequence in self._sequences_of(request_id):
            fence = max(sequence.authorized_tokens, authorized_tokens)
            self._scheduler.move_fence(sequence, fence)

    def refuse(self, request: GenerateRequest, reason: str, *, is_callers_fault: bool) -> None:
        """Answer a request that was never added: it cannot be served."""
        first = Sequence.all_of(request, self._now_us())[0]
        self._reporter.open(request, first.num_choices)
        self._end(first, "error", error=reason, is_refused=is_callers_fault)

    def cancel(
        self, request_id: str, attempt: int | None = None, *, is_silent: bool = False
    ) -> None:
        """End a request now and free what it holds; unknown ones are ignored."""
        for sequence in self._sequences_of(request_id):
            if attempt is None or sequence.request.attempt <= attempt:
                self._end(sequence, "abort", is_silent=is_silent)

    def end_choice(self, request_id: str, choice: int) -> None:
        """Stop one choice and say nothing of it; before its first token this changes nothing."""
        for sequence in self._sequences_of(request_id):
            if sequence.choice == choice and sequence.num_choices == 1:
                self._end(sequence, "abort", is_silent=True)

    def cancel_nodes(self, nodes: set[str]) -> None:
        """End every request whose API node is dead: nobody waits for its tokens."""
        for sequence in self._scheduler.sequences():
            if sequence.request.node in nodes:
                self._end(sequence, "abort", is_silent=True)

    def step(self) -> StepOutput:
        """Compute the next batch. Whatever it raises, `abandon` puts the engine right again.

        A runner that is ahead computes it while the result of the batch before is told.
        """
        if self._scheduler.must_know_tokens:
            self._land_until(0)
        batch = self._schedule()
        if not batch.is_empty:
            self._launch(batch)
        is_ahead = self._runner.is_ahead and not batch.is_empty and not batch.prompt_spans
        self._land_until(1 if is_ahead else 0)
        return self._hand_over()

    def prepare(self) -> bool:
        """A few milliseconds of what later steps would wait for. Whether there was any of it to do."""
        blocks = self._scheduler.blocks
        return self._warmer is not None and self._warmer.work(blocks.num_used)

    def abandon(self, error: str) -> StepOutput:
        """The step failed: end its sequences with an error; the others go on."""
        scheduler = self._scheduler
        flights = [scheduler.crew_of(each.batch, each.crew) for each in self._flights]
        members = [sequence for crew in flights for sequence in crew]
        if self._batch is not None:
            members += scheduler.members(self._batch)
        elif not self._flights:
            members = scheduler.sequences()
        self._flights.clear()
        open_ones = set(scheduler.sequences())
        for sequence in dict.fromkeys(members):
            if sequence in open_ones:
                self._end(sequence, "error", error=error)
        if scheduler.problems():
            for sequence in scheduler.sequences():
                self._end(sequence, "error", error=error)
            self._scheduler = self._create_scheduler()
        return self._hand_over()

    def withdraw_waiting(self, model: str = "") -> list[str]:
        """Forget the requests that have not started, or stand at their fence; other workers may
        run them. Those for an adapter if `model` names one, else those that need none.
        """
        number = self._adapters.get(model, 0)
        sequences = [each for each in self._scheduler.sequences() if each.adapter == number]
        parked = self._scheduler.parked
        started = {
            each.request.request_id for each in sequences if each.order >= 0 and each not in parked
        }
        waiting = [each for each in sequences if each.request.request_id not in started]
        for sequence in waiting:
            self._scheduler.remove(sequence)
            self._reporter.forget(sequence.request.request_id)
        return list(dict.fromkeys(each.request.request_id for each in waiting))

    def problems(self) -> list[str]:
        """Count all blocks and slots; empty when each is owned as often as it is referenced."""
        return self._scheduler.problems()

    # the three parts of a step

    def _schedule(self) -> StepBatch:
        self._batch = None
        self._scheduler.cost_model = self._meter.planning_model
        self._speculator.cost_model = self._meter.corrected
        self._batch = self._scheduler.schedule(self._now_us())
        return self._batch

    def _launch(self, batch: StepBatch) -> None:
        scheduler = self._scheduler
        pending = self._runner.start(batch, scheduler.slots, scheduler.adjusted(batch))
        self._flights.append(Flight(batch, scheduler.launch(batch), pending))

    def _land_until(self, num_left: int) -> None:
        while len(self._flights) > num_left:
            flight = self._flights[0]
            self._postprocess(flight, flight.pending.result())
            self._flights.popleft()

    def _postprocess(self, flight: Flight, sampled: Sampled) -> None:
        now_us = self._now_us()
        batch = flight.batch
        is_there = self._scheduler.land(batch, flight.crew)
        self._num_steps += 1
        self._num_prefill_tokens += batch.num_prefill_tokens
        began_us = max(batch.scheduled_us, self._landed_us)
        self._landed_us = now_us
        self._note_seconds(flight, began_us, now_us)
        for span, told in zip(batch.prompt_spans, sampled.prompt_logprobs, strict=True):
            span.sequence.note_prompt_told(told.end)
            self._reporter.tell_prompt(span.sequence, told)
        if sampled.vectors:
            for slot, vector in zip(batch.sample_slots.tolist(), sampled.vectors, strict=True):
                self._answer(self._scheduler.in_slot(slot), vector, now_us)
            return
        runs = [run for run in runs_of(batch, sampled.token_ids) if is_there[run.first_row]]
        for sequence, run in self._append(batch, runs, now_us):
            self._accept(sequence, run, sampled.logprobs, now_us)

    def _note_seconds(self, flight: Flight, began_us: int, now_us: int) -> None:
        """What the step took, and whose it was."""
        batch, seconds = flight.batch, (now_us - began_us) / 1e6
        self._meter.observe(batch, seconds)
        if not batch.chunks:
            self._speculator.observe(work_of(batch), seconds, has_drafts=len(batch.drafts) > 0)
        charges = charge_step(flight.crew.sequences, batch, self.cost_model, seconds)
        self._waits.note(charges, began_us, now_us)
        self._scheduler.use.note(charges)
        self._reporter.charge(charges)

    def _answer(self, sequence: Sequence, vector: bytes | None, now_us: int) -> None:
        """A pooled prompt is done with one frame."""
        if vector is None:
            self._end(sequence, "error", error="the model computed no finite vector")
            return
        sequence.first_token_us = now_us
        self._reporter.tell_vector(sequence, vector)
        self._close(sequence)

    def _append(self, batch: StepBatch, runs: list[Run], now_us: int) -> list[tuple[Sequence, Run]]:
        """What the sequences have said becomes theirs; those without a finite logit end."""
        scheduler = self._scheduler
        rows: list[int] = []
        said: list[Run] = []
        for sampled in runs:
            sequence = scheduler.in_slot(int(batch.sample_slots[sampled.first_row]))
            run = sampled.until_stop(sequence.request.sampling.stop_token_ids)
            if run.token_ids[0] < 0:
                self._end(sequence, "error", error="the model computed no finite logit")
                continue
            if run.num_drafts:
                self._speculator.note(sequence, run.num_drafts, len(run.token_ids) - 1)
                scheduler.accept_drafts(sequence, run.token_ids[:-1])
            rows.append(run.last_row)
            said.append(run)
            self._num_output_tokens += len(run.token_ids)
        tokens = np.array([run.token_ids[-1] for run in said], dtype=np.int64)
        sequences = scheduler.append(batch.sample_slots[rows], tokens, now_us)
        return list(zip(sequences, said, strict=True))

    def _accept(
        self, sequence: Sequence, run: Run, logprobs: dict[int, TokenLogprob], now_us: int
    ) -> None:
        """What was said in this step leaves in a frame, and may be the end."""
        if sequence.structure is not None:
            for token in run.token_ids:
                sequence.structure.accept(token)
            if sequence.structure.is_too_slow:
                self._end(sequence, "error", error=TOO_AMBIGUOUS, is_refused=True)
                return
        is_first = sequence.first_token_us is None
        sequence.first_token_us = now_us if is_first else sequence.first_token_us
        reason = self._finish_reason(sequence, run.token_ids[-1])
        said = tuple(logprobs[row] for row in run.rows) if run.first_row in logprobs else None
        self._reporter.tell_tokens(sequence, run, said, reason, is_first=is_first)
        if reason is not None:
            self._scheduler.outlook.learn_length(sequence.num_generated)
            self._close(sequence)
        elif sequence.is_at_fence:
            self._scheduler.park(sequence)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.sampling.stop_token_ids:
            return "stop"
        if sequence.num_generated >= request.max_tokens:
            return "length"
        return "length" if sequence.num_tokens >= self.context_length else None

    # ending

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str | None = None,
        is_silent: bool = False,
        is_refused: bool = False,
    ) -> None:
        """End a sequence outside the course of things; one that has not forked has many choices."""
        if not is_silent:
            self._reporter.tell_end(sequence, reason, error=error, is_refused=is_refused)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Free what the sequence holds."""
        self._scheduler.remove(sequence)
        self._reporter.close(sequence)

    # inside

    def _hand_over(self) -> StepOutput:
        self._batch = None
        return self._reporter.hand_over(self._num_steps)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        sequences = self._scheduler.sequences()
        return [sequence for sequence in sequences if sequence.request.request_id == request_id]

    def _problem_with(self, request: GenerateRequest) -> str | None:
        """Why the request can never run here, or None; the API node should have refused it."""
        emitted = request.emitted_token_ids
        known = [*request.prompt_token_ids, *(token for tokens in emitted for token in tokens)]
        longest = len(request.prompt_token_ids) + max(map(len, emitted), default=0)
        problems = {
            "the prompt is empty": not request.prompt_token_ids,
            "a token id is outside the vocabulary": (
                min(known, default=0) < 0 or max(known, default=0) >= self.vocab_size
            ),
            "the model answers with another kind of output": (
                request.is_pooled != self._runner.is_pooling
            ),
            "nothing was asked for": request.authorized_tokens < 1 or request.num_choices < 1,
            "not every choice says what it has emitted": (
                bool(emitted) and len(emitted) != request.num_choices
            ),
            "the prompt leaves no room in the context": longest >= self.context_length,
            "the request is larger than this worker's KV cache": (
                not self._scheduler.fits(request, self.context_length)
            ),
        }
        return next((problem for problem, is_so in problems.items() if is_so), None)

    def _create_scheduler(self) -> Scheduler:
        return create_scheduler(
            self._settings,
            num_blocks=self._num_blocks,
            context_length=self.context_length,
            cost_model=self.cost_model,
            policy=self._policy,
            is_whole=self._runner.is_pooling,
            speculator=self._speculator if self._may_draft else None,
        )
