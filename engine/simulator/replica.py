"""One simulated worker: the real scheduler, block manager and prefix cache, steps that take no time.

What `engine.Engine` and `engine.worker.io_thread` do around a forward pass is done here around the
machine's clock: take what there is room for, schedule, and, when the step's seconds are over,
postprocess, charge and finish. Tokens are zeros; only their number matters.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch import StepBatch
from engine.broker.twin import BrokerTwin
from engine.broker.window import take_room
from engine.cost_model import key_when_taken
from engine.messages import GenerateRequest, Sampling, StepWork
from engine.scheduling.assembly import BLOCK_SIZE, create_scheduler
from engine.scheduling.charges import charge_step
from engine.scheduling.crew import Crew
from engine.sequence import Sequence
from engine.simulator.ledger import RunLedger
from engine.simulator.machines import Machine
from engine.simulator.policies import Policy
from engine.simulator.prompts import prompt_token_ids

ATTEMPT = 1
GREEDY = Sampling(temperature=0.0)


class Replica:
    """A worker of the simulated deployment."""

    def __init__(self, name: str, machine: Machine, policy: Policy, ledger: RunLedger) -> None:
        self.name = name
        self._machine = machine
        self._policy = policy
        self._ledger = ledger
        self._scheduler = create_scheduler(
            machine.settings,
            num_blocks=machine.kv_tokens // BLOCK_SIZE,
            context_length=machine.context_length,
            cost_model=machine.cost_model,
            policy=policy.plan,
        )
        self._batch: StepBatch | None = None
        self._step_s = 0.0
        self._held: set[int] = set()
        """Requests taken and not finished."""
        num_slots = self._scheduler.slots.num_slots
        self._request_in_slot: NDArray[np.intp] = np.zeros(num_slots, dtype=np.intp)
        self._output_tokens = np.array(
            [request.output_tokens for request in ledger.requests], dtype=np.int32
        )

    @property
    def is_busy(self) -> bool:
        """Whether a step is running."""
        return self._batch is not None

    @property
    def held(self) -> list[tuple[str, int]]:
        """(request, attempt) of everything that it has taken and not finished."""
        return [(str(index), ATTEMPT) for index in self._held]

    def take(self, broker: BrokerTwin, now_s: float) -> None:
        """Fetch what may soon start, as the worker's I/O thread does after every step."""
        settings = self._machine.settings
        room = take_room(
            num_waiting=self._scheduler.num_waiting,
            num_held=len(self._held),
            max_running=settings.max_running,
            take_window=self._policy.take_window or settings.take_window,
        )
        waiting = self._scheduler.waiting.weights
        spare = room.for_others if self._policy.is_fair else 0
        for taken in broker.take(self.name, room.for_any, spare, waiting):
            index = int(taken.request_id)
            self._held.add(index)
            self._add(broker, index, taken.key, now_s)

    def _add(self, broker: BrokerTwin, index: int, key: float, now_s: float) -> None:
        if self._policy.alpha is not None:
            waited_s = now_s - self._ledger.requests[index].arrival_s
            key = key_when_taken(key, waited_s, self._policy.alpha)
        request = self._request(index, key)
        traced = self._ledger.requests[index]
        is_short = traced.prompt_tokens + traced.output_tokens <= self._machine.context_length
        if is_short and self._scheduler.fits(request, self._machine.context_length):
            for sequence in Sequence.all_of(request, _us(now_s)):
                self._scheduler.add(sequence)
        else:
            self._ledger.refused.append(index)
            self._finish(broker, index)

    def _request(self, index: int, key: float) -> GenerateRequest:
        traced = self._ledger.requests[index]
        return GenerateRequest(
            request_id=str(index),
            model="simulated",
            node="simulated",
            tenant=traced.tenant,
            prompt_token_ids=prompt_token_ids(traced, index),
            sampling=GREEDY,
            authorized_tokens=traced.authorized_tokens,
            max_tokens=traced.authorized_tokens,
            arrival_ms=round(1000 * traced.arrival_s),
            key=key,
        )

    def start_step(self, now_s: float) -> float | None:
        """Schedule the next step; its seconds, or None where there is nothing to compute."""
        if not self._scheduler.has_work:
            return None
        before = self._scheduler.num_preemptions
        batch = self._scheduler.schedule(_us(now_s))
        assert not batch.is_empty, "there is work, but the plan is empty"
        self._batch = batch
        self._step_s = self._machine.cost_model.step_s(_work(batch))
        self._ledger.num_steps += 1
        self._ledger.busy_s += self._step_s
        self._ledger.num_preemptions += self._scheduler.num_preemptions - before
        return self._step_s

    def finish_step(self, broker: BrokerTwin, now_s: float) -> None:
        """The step's seconds are over: its tokens leave, tenants pay, finished requests end."""
        batch, self._batch = self._batch, None
        assert batch is not None
        scheduler = self._scheduler
        crew = scheduler.launch(batch)
        scheduler.land(batch, crew)
        self._charge(broker, batch, crew)
        for chunk in batch.chunks:
            if chunk.is_last:
                self._note_prefilled(chunk.sequence)
        slots = batch.sample_slots
        scheduler.append(slots, np.zeros(len(slots), dtype=np.int64), _us(now_s))
        indices = self._request_in_slot[slots]
        self._ledger.note_tokens(indices, now_s)
        is_over = scheduler.slots.num_generated[slots] >= self._output_tokens[indices]
        for slot, index in zip(slots[is_over].tolist(), indices[is_over].tolist(), strict=True):
            sequence = scheduler.in_slot(slot)
            scheduler.outlook.learn_length(sequence.num_generated)
            scheduler.remove(sequence)
            self._finish(broker, index)

    def _note_prefilled(self, sequence: Sequence) -> None:
        index = int(sequence.request.request_id)
        self._request_in_slot[sequence.slot] = index
        self._ledger.num_cached[index] = sequence.num_cached_tokens or 0

    def _charge(self, broker: BrokerTwin, batch: StepBatch, crew: Crew) -> None:
        if not self._policy.is_fair:
            return
        charges = charge_step(crew.sequences, batch, self._machine.cost_model, self._step_s)
        self._scheduler.use.note(charges)
        for tenant, seconds in charges.items():
            broker.charge(tenant, seconds)

    def _finish(self, broker: BrokerTwin, index: int) -> None:
        self._held.remove(index)
        broker.finish(self.name, [(str(index), ATTEMPT)])

    def problems(self) -> list[str]:
        """What is wrong with the ownership of KV blocks; empty when nothing is."""
        return self._scheduler.problems()


def _work(batch: StepBatch) -> StepWork:
    """What the batch computes, as the machine counts it."""
    query_lens = np.diff(batch.query_start).astype(np.float64)
    read = query_lens * (batch.context_lens - query_lens / 2)
    num_chunks = len(batch.chunks)
    return StepWork(
        num_tokens=len(batch.token_ids),
        num_samples=len(batch.sample_slots),
        prefill_pairs=float(read[:num_chunks].sum()),
        decode_context=float(batch.context_lens[num_chunks:].sum()),
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
