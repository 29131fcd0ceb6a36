"""The policies that a simulation or a benchmark can put side by side.

A policy is how steps are planned and how the queue is ordered. Ours is the product's own planner behind
the fair queue; the peers have one queue in the order of arrival, as they have no tenants. Each of
ours "without" an ingredient is ours with that one thing taken away.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from engine.cost_model import ALPHA
from engine.messages import CostModel
from engine.scheduling.plan import Limits, Plan, PlannerState, PrefillState
from engine.scheduling.planner import PlanFunction, plan
from engine.simulator.sglang_policy import sglang
from engine.simulator.vllm_policy import vllm

PEER_WINDOW = 512
"""A peer's scheduler sees its whole queue; more than this it could not start in one step."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How steps are planned, and in which order requests leave the queue."""

    name: str
    description: str
    plan: PlanFunction
    is_fair: bool = False
    """Tenants share by virtual time; otherwise all requests are one queue."""
    alpha: float | None = None
    """Ageing of the key; None puts a tenant's requests in the order of arrival."""
    take_window: int | None = None
    """Waiting requests that the planner sees; None is the machine's setting."""


def without_pausing(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """Ours, but a prefill that has begun goes before all that have not."""
    begun = min((prefill.key for prefill in state.prefills), default=0.0) - 1e9
    prefills = [
        prefill._replace(key=begun + prefill.order) if prefill.is_admitted else prefill
        for prefill in state.prefills
    ]
    return plan(replace(state, prefills=prefills), limits, cost_model)


def without_time_budget(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """Ours, but a step is budgeted in tokens."""
    return plan(state, limits, None)


def without_deferral(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """Ours, but decodes ride along in every step."""
    return plan(state, replace(limits, ride_share=inf), cost_model)


def without_reservation(state: PlannerState, limits: Limits, cost_model: CostModel | None) -> Plan:
    """Ours, but no block is kept for the growth of what runs."""
    size = limits.block_size

    def bare(prefill: PrefillState) -> PrefillState:
        num_all = -(-(prefill.num_computed + prefill.num_remaining) // size)
        return prefill._replace(num_reserved=max(0, num_all - prefill.num_held))

    decodes = replace(state.decodes, num_reserved=state.decodes.num_new_blocks.astype(np.int32))
    bare_state = replace(
        state, prefills=[bare(prefill) for prefill in state.prefills], decodes=decodes
    )
    return plan(bare_state, limits, cost_model)


OURS = Policy("ncompass", "this product", plan, is_fair=True, alpha=ALPHA)

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        OURS,
        Policy("vllm", "vLLM v1, its default", vllm(), take_window=PEER_WINDOW),
        Policy(
            "vllm-tuned",
            "vLLM v1 with --long-prefill-token-threshold 1024",
            vllm(long_prefill_threshold=1024),
            take_window=PEER_WINDOW,
        ),
        Policy("sglang", "SGLang: prefill batches first", sglang(), take_window=PEER_WINDOW),
        Policy("ncompass-no-order", "ours in the order of arrival", plan, is_fair=True),
        Policy("ncompass-no-pausing", "ours, no pauses", without_pausing, True, ALPHA),
        Policy("ncompass-no-time-budget", "ours by tokens", without_time_budget, True, ALPHA),
        Policy("ncompass-no-deferral", "ours, decodes always ride", without_deferral, True, ALPHA),
        Policy("ncompass-no-reservation", "ours, no reserve", without_reservation, True, ALPHA),
    )
}

INGREDIENTS = {
    "order": "ncompass-no-order",
    "pausing": "ncompass-no-pausing",
    "time budget": "ncompass-no-time-budget",
    "deferral": "ncompass-no-deferral",
    "reservation": "ncompass-no-reservation",
}
"""What each brings is seen by leaving it out."""
