"""The engine: requests of token ids in, frames of token ids out, one step at a time.

A step is three statements: schedule, run, postprocess. Text, names and money are unknown here.
Not for two threads: the worker's engine thread owns it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from common.clock import Clock, utc_now_us
from engine.batch import AdjustedRow, StepBatch
from engine.cost_model import key_when_taken
from engine.costs.step_meter import NO_STEPS, StepMeter, StepTotals, work_of
from engine.errors import ModelRefused
from engine.flight import Flight, Pending
from engine.messages import (
    CostModel,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    Timing,
    TokenFrame,
    TokenLogprob,
)
from engine.models.model import AdaptableModel, Model
from engine.sampler import Sampled
from engine.scheduling.assembly import BLOCK_SIZE, create_scheduler
from engine.scheduling.charges import charge_step
from engine.scheduling.planner import PlanFunction, plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.slots import SlotTable
from engine.scheduling.waits import WaitLedger
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.speculation.acceptance import Run, runs_of
from engine.speculation.speculator import Speculator

if TYPE_CHECKING:  # only workers load the grammar engine
    from engine.models.adapters.weights import Adapter
    from engine.structures.grammar import Grammar

TOO_AMBIGUOUS = "The required form is too ambiguous to follow any further."


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt of a request that holds nothing any more."""

    request_id: str
    attempt: int


@dataclass(slots=True)
class StepOutput:
    """What one step produced, and what ended since the step before."""

    step: int
    frames: dict[str, list[TokenFrame]] = field(default_factory=dict)
    """By API node."""
    finished: list[Ended] = field(default_factory=list)
    charges: dict[str, float] = field(default_factory=dict)
    """Machine seconds by tenant."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for the heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    """Requests of which a choice stands at its fence."""
    waiting_tenants: frozenset[str] = frozenset()
    """Of the requests that hold no KV blocks."""
    free_kv_tokens: int = 0
    total_kv_tokens: int = 0
    num_steps: int = 0
    output_tokens_total: int = 0
    prefill_tokens_total: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    """Tokens that were guessed and computed beside those that were due."""
    num_accepted_drafts: int = 0
    cost_model: CostModel | None = None
    """Corrected by the last steps."""
    totals: StepTotals = NO_STEPS
    prediction_error: float = 0.0
    is_prediction_trusted: bool = False


class Runner(Protocol):
    """What computes a step."""

    @property
    def model(self) -> Model:
        """The model that it runs."""

    @property
    def is_pooling(self) -> bool:
        """Whether it answers whole prompts with vectors, and never with tokens."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step may start before the result of the last one is known."""

    def start(self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]) -> Pending:
        """Compute the batch, and what is wanted of its sample rows; the result may come later."""


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
        self._waits = waits or WaitLedger()
        self._now_us = now_us
        self._utc_now_us = utc_now_us
        self._speculator = Speculator(self.context_length)
        self._scheduler = self._create_scheduler()
        self._meter = StepMeter(cost_model)
        self._open_choices: Counter[str] = Counter()
        self._batch: StepBatch | None = None
        self._flights: deque[Flight] = deque()
        """Steps whose results are not known yet: one at most between two calls of `step`."""
        self._landed_us = 0
        self._output = StepOutput(step=0)
        self._adapters: dict[str, int] = {}
        """Numbers of the adapters by the models' names that requests ask for."""
        self._num_adapters = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_prefill_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or has something to say."""
        has_news = bool(self._flights or self._output.frames or self._output.finished)
        return has_news or self._scheduler.has_work

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
        if request.request_id in self._open_choices:
            self.cancel(request.request_id, is_silent=True)  # an earlier attempt came back to us
        problem = self._problem_with(request)
        queued_us = max(0, self._utc_now_us() - request.arrival_ms * 1_000)
        key = key_when_taken(request.key, waited_s=queued_us / 1e6)
        room = self.context_length - len(request.prompt_token_ids)
        request = msgspec.structs.replace(
            request, key=key, max_tokens=min(request.max_tokens, room)
        )
        sequences = Sequence.all_of(request, self._now_us(), may_fork=self._may_fork)
        self._open_choices[request.request_id] = sum(each.num_choices for each in sequences)
        if not sequences:
            self._finish(request)
        for sequence in sequences:
            sequence.adapter = self._adapters.get(request.model, 0)
            sequence.queued_us = queued_us
            if problem is not None:
                self._end(sequence, "error", error=problem)
            elif sequence.num_generated >= request.max_tokens:
                self._end(sequence, "length")
            else:
                self._accept_grammar(sequence, grammar)
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
        self._open_choices[request.request_id] = first.num_choices
        self._end(first, "error", error=reason, is_refused=is_callers_fault)

    def cancel(
        self, request_id: str, attempt: int | None = None, *, is_silent: bool = False
    ) -> None:
        """End a request now and free what it holds; unknown ones are ignored."""
        for sequence in self._sequences_of(request_id):
            if attempt is None or sequence.request.attempt <= attempt:
                self._end(sequence, "abort", is_silent=is_silent)

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
            self._open_choices.pop(sequence.request.request_id, None)
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
            self._tell_prompt(span.sequence, told)
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
        for tenant, share in charges.items():
            self._output.charges[tenant] = self._output.charges.get(tenant, 0.0) + share

    def _answer(self, sequence: Sequence, vector: bytes | None, now_us: int) -> None:
        """A pooled prompt is done with one frame."""
        if vector is None:
            self._end(sequence, "error", error="the model computed no finite vector")
            return
        sequence.first_token_us = now_us
        request = sequence.request
        frame = TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=0,
            token_ids=(),
            finish_reason="stop",
            timing=self._timing(sequence),
            vector=vector,
        )
        self._say(request.node, frame)
        self._close(sequence)

    def _tell_prompt(self, sequence: Sequence, told: PromptLogprobs) -> None:
        """A part of a prompt is computed, and how likely its tokens were leaves in a frame."""
        sequence.note_prompt_told(told.end)
        request = sequence.request
        frame = TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=sequence.num_generated,
            token_ids=(),
            choice=sequence.choice,
            prompt_logprobs=told,
        )
        self._say(request.node, frame)

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
        token = run.token_ids[-1]
        reason = self._finish_reason(sequence, token)
        request = sequence.request
        has_logprobs = run.first_row in logprobs
        frame = TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=sequence.num_generated - len(run.token_ids),
            token_ids=tuple(run.token_ids),
            choice=sequence.choice,
            logprobs=tuple(logprobs[row] for row in run.rows) if has_logprobs else None,
            num_drafts=run.num_drafts,
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
            num_cached_tokens=(sequence.num_cached_tokens or 0) if is_first else 0,
            timing=self._timing(sequence) if is_first or reason else None,
        )
        self._say(request.node, frame)
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
        request = sequence.request
        for choice in range(sequence.choice, sequence.choice + sequence.num_choices):
            frame = TokenFrame(
                request_id=request.request_id,
                attempt=request.attempt,
                first_index=sequence.num_generated,
                token_ids=(),
                choice=choice,
                finish_reason=reason,
                error=error,
                is_refused=is_refused,
                timing=self._timing(sequence),
            )
            if not is_silent:
                self._say(request.node, frame)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Free what the sequence holds; its request is finished with its last choice."""
        request_id = sequence.request.request_id
        self._scheduler.remove(sequence)
        self._open_choices[request_id] -= sequence.num_choices
        if self._open_choices[request_id] <= 0:
            self._finish(sequence.request)

    def _finish(self, request: GenerateRequest) -> None:
        del self._open_choices[request.request_id]
        self._output.finished.append(Ended(request.request_id, request.attempt))

    def _timing(self, sequence: Sequence) -> Timing:
        now_us = self._now_us()
        started_us = sequence.prefill_started_us
        if started_us is None:
            return Timing(queued_us=sequence.queued_us + now_us - sequence.added_us)
        first_us = sequence.first_token_us
        arrived_us = sequence.added_us - sequence.queued_us
        if sequence.waited is None:
            tenant = sequence.request.tenant
            sequence.waited = self._waits.behind(tenant, arrived_us, started_us)
        return Timing(
            queued_us=started_us - arrived_us,
            behind_own_us=sequence.waited.behind_own_us,
            behind_others_us=sequence.waited.behind_others_us,
            num_tenants=sequence.waited.num_tenants,
            prefill_us=(first_us or now_us) - started_us,
            decode_us=0 if first_us is None else now_us - first_us,
        )

    # inside

    def _accept_grammar(self, sequence: Sequence, grammar: "Grammar | None") -> None:
        request = sequence.request
        if grammar is None:
            return
        sequence.structure = grammar.start(sequence.output_token_ids.tolist())
        accepted = TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=sequence.num_generated,
            token_ids=(),
            choice=sequence.choice,
            is_accepted=True,
        )
        self._say(request.node, accepted)

    def _say(self, node: str, frame: TokenFrame) -> None:
        self._output.frames.setdefault(node, []).append(frame)

    def _hand_over(self) -> StepOutput:
        output = self._output
        output.step = self._num_steps
        self._output = StepOutput(step=self._num_steps)
        self._batch = None
        return output

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
