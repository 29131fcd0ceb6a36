"""What an engine hands out: the output of a step, and a snapshot of its counters."""

from dataclasses import dataclass, field

from engine.costs.step_meter import NO_STEPS, StepTotals
from engine.messages import CostModel, TokenFrame


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
