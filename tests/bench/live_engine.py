"""A real engine behind the broker's twin, fed by a trace in real time, without HTTP and Redis.

The same queue, window and ledger as the simulator's, so that its prediction can be held against it.
"""

import time
from collections.abc import Iterable

import numpy as np

from engine.broker.settings import BrokerSettings
from engine.broker.twin import BrokerTwin, TwinRequest
from engine.broker.window import take_room
from engine.cost_model import queue_price
from engine.engine import Engine
from engine.messages import CostModel, GenerateRequest, Sampling
from engine.output import StepOutput
from engine.settings import EngineSettings
from engine.simulator.ledger import RunLedger
from engine.simulator.policies import Policy
from engine.simulator.prompts import prompt_token_ids
from engine.simulator.simulation import ONE_QUEUE, PLACE_S
from engine.simulator.trace import TracedRequest

WORKER, NODE = "worker", "node"


class LiveRun:
    """Plays one trace; `run` returns when every request has ended."""

    def __init__(
        self,
        engine: Engine,
        settings: EngineSettings,
        policy: Policy,
        cost_model: CostModel,
        requests: list[TracedRequest],
    ) -> None:
        self.engine, self.settings, self.policy = engine, settings, policy
        self.cost_model, self.requests = cost_model, requests
        self.ledger = RunLedger.of(requests)
        self.started_s = time.perf_counter()
        self.started_ms = time.time() * 1000
        self.broker = BrokerTwin(BrokerSettings(), lambda: 1000 * self.now_s)
        self.num_arrived = 0
        self.held: set[int] = set()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.started_s

    def run(self) -> RunLedger:
        before = self.engine.stats.num_preemptions
        while self.num_arrived < len(self.requests) or self.held or self.broker.tenants:
            self.submit_arrivals()
            self.take()
            if self.engine.has_work:
                step_started_s = self.now_s
                output = self.engine.step()
                self.note(output)
                self.ledger.num_steps += 1
                self.ledger.busy_s += self.now_s - step_started_s
            else:
                wait_s = self.requests[self.num_arrived].arrival_s - self.now_s
                time.sleep(max(0.0, wait_s))
        self.ledger.num_preemptions = self.engine.stats.num_preemptions - before
        return self.ledger

    def submit_arrivals(self) -> None:
        while self.num_arrived < len(self.requests):
            index, request = self.num_arrived, self.requests[self.num_arrived]
            if request.arrival_s > self.now_s:
                return
            self.num_arrived += 1
            arrival_ms = self.arrival_ms(request)
            price = queue_price(self.cost_model, request.prompt_tokens, arrival_ms=arrival_ms)
            is_fair = self.policy.is_fair
            queued = TwinRequest(
                str(index),
                tenant=request.tenant if is_fair else ONE_QUEUE,
                node=NODE,
                key=price.key if self.policy.alpha is not None else index * PLACE_S,
                work_s=price.work_s if is_fair else 0.0,
            )
            self.broker.submit(queued)

    def take(self) -> None:
        room = take_room(
            num_waiting=self.engine.stats.num_waiting,
            num_held=len(self.held),
            max_running=self.settings.max_running,
            take_window=self.policy.take_window or self.settings.take_window,
        )
        waiting = self.engine.stats.waiting_tenants
        spare = room.for_others if self.policy.is_fair else 0
        for taken in self.broker.take(WORKER, room.for_any, spare, waiting):
            index = int(taken.request_id)
            self.held.add(index)
            self.engine.add(self.generate_request(index, taken.key))

    def generate_request(self, index: int, key: float) -> GenerateRequest:
        traced = self.requests[index]
        ids = [1000 + token % 40_000 for token in prompt_token_ids(traced, index)]
        return GenerateRequest(
            request_id=str(index),
            model="live",
            node=NODE,
            tenant=traced.tenant if self.policy.is_fair else ONE_QUEUE,
            prompt_token_ids=ids,
            sampling=Sampling(temperature=0.0),
            authorized_tokens=traced.output_tokens,
            max_tokens=traced.output_tokens,
            arrival_ms=self.arrival_ms(traced),
            key=key,
        )

    def arrival_ms(self, request: TracedRequest) -> int:
        return round(self.started_ms + 1000 * request.arrival_s)

    def note(self, output: StepOutput) -> None:
        frames = [frame for of_node in output.frames.values() for frame in of_node]
        assert not any(frame.error for frame in frames), [f.error for f in frames if f.error]
        indices = np.array([int(f.request_id) for f in frames if f.token_ids], dtype=np.intp)
        self.ledger.note_tokens(indices, self.now_s)
        if self.policy.is_fair:
            for tenant, seconds in output.charges.items():
                self.broker.charge(tenant, seconds)
        self.finish(int(ended.request_id) for ended in output.finished)

    def finish(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.held.remove(index)
            self.broker.finish(WORKER, [(str(index), 1)])
