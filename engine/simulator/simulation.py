"""A whole deployment in simulated time: arrivals, one fair queue, replicas that take from it.

The only events are arrivals and ends of steps. The queue is the broker's twin, the replicas
run the product's scheduler; nothing here decides anything.
"""

from heapq import heappop, heappush

from engine.broker.settings import BrokerSettings
from engine.broker.twin import BrokerTwin, TwinRequest
from engine.cost_model import queue_price
from engine.messages import CostModel
from engine.simulator.ledger import RunLedger
from engine.simulator.machines import Machine
from engine.simulator.policies import Policy
from engine.simulator.replica import Replica
from engine.simulator.trace import TracedRequest

NODE = "simulated"
PLACE_S = 1e6
"""Keys of requests in the order of arrival lie this far apart: more than a prefix hit can save."""
ONE_QUEUE = "everybody"
"""The tenant of all requests where a policy knows no tenants."""


class Simulation:
    """`run` plays one trace (by arrival) on `num_machines` equal machines."""

    def __init__(
        self,
        requests: list[TracedRequest],
        machine: Machine,
        policy: Policy,
        num_machines: int = 1,
    ) -> None:
        self._now_s = 0.0
        self._requests = requests
        self._policy = policy
        self._ledger = RunLedger.of(requests)
        self._cost_model: CostModel = machine.cost_model
        self._broker = BrokerTwin(BrokerSettings(), lambda: 1000 * self._now_s)
        self._replicas = [
            Replica(f"worker-{number}", machine, policy, self._ledger)
            for number in range(num_machines)
        ]
        self._heartbeat_s = machine.settings.heartbeat_s
        self._next_heartbeat_s = 0.0
        self._step_ends: list[tuple[float, int]] = []
        """(when, which replica)"""
        self._num_arrived = 0

    def run(self) -> RunLedger:
        """Until every request has ended; the same input gives the same ledger."""
        while self._step_ends or self._num_arrived < len(self._requests):
            ended = self._advance()
            self._submit_arrivals()
            self._keep_alive()
            if ended is not None:
                ended.finish_step(self._broker, self._now_s)
            for number, replica in enumerate(self._replicas):
                if not replica.is_busy:
                    self._start(number, replica)
        problems = [problem for replica in self._replicas for problem in replica.problems()]
        assert not problems, problems
        return self._ledger

    def _advance(self) -> Replica | None:
        """Go on to the next event; the replica whose step ends there, if it is one."""
        arrival_s = float("inf")
        if self._num_arrived < len(self._requests):
            arrival_s = self._requests[self._num_arrived].arrival_s
        if self._step_ends and self._step_ends[0][0] <= arrival_s:
            self._now_s, number = heappop(self._step_ends)
            return self._replicas[number]
        self._now_s = arrival_s
        return None

    def _submit_arrivals(self) -> None:
        while self._num_arrived < len(self._requests):
            index = self._num_arrived
            request = self._requests[index]
            if request.arrival_s > self._now_s:
                return
            self._num_arrived += 1
            self._broker.submit(self._queued(index, request))

    def _queued(self, index: int, request: TracedRequest) -> TwinRequest:
        policy = self._policy
        key, work_s = index * PLACE_S, 0.0
        if policy.alpha is not None:
            price = queue_price(
                self._cost_model,
                request.prompt_tokens,
                arrival_ms=round(1000 * request.arrival_s),
                alpha=policy.alpha,
            )
            key, work_s = price.key, price.work_s
        tenant = request.tenant if policy.is_fair else ONE_QUEUE
        return TwinRequest(str(index), tenant=tenant, node=NODE, key=key, work_s=work_s)

    def _keep_alive(self) -> None:
        """What nodes and workers do at intervals: announce, renew, sweep."""
        if self._now_s < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = self._now_s + self._heartbeat_s
        self._broker.announce(NODE)
        for replica in self._replicas:
            self._broker.renew(replica.name, replica.held)
        self._broker.sweep()

    def _start(self, number: int, replica: Replica) -> None:
        replica.take(self._broker, self._now_s)
        seconds = replica.start_step(self._now_s)
        if seconds is not None:
            heappush(self._step_ends, (self._now_s + seconds, number))


def simulate(
    requests: list[TracedRequest], machine: Machine, policy: Policy, num_machines: int = 1
) -> RunLedger:
    """Play one trace under one policy."""
    return Simulation(requests, machine, policy, num_machines).run()
