"""A machine whose times can be worked out by hand: a millisecond a token, nothing else."""

from dataclasses import replace

from engine.messages import CostModel
from engine.settings import EngineSettings
from engine.simulator.machines import Machine
from engine.simulator.trace import TracedRequest

A_MS_A_TOKEN = CostModel(
    base_s=0.0, per_token_s=1e-3, per_prefill_context_s=0.0, per_decode_context_s=0.0
)
MACHINE = Machine(
    name="by hand",
    cost_model=A_MS_A_TOKEN,
    kv_tokens=64 * 640,
    context_length=8192,
    settings=EngineSettings(
        max_running=64, max_step_tokens=512, step_s=0.128, idle_step_s=0.256, gap_s=1.0, pace_s=0.5
    ),
)


def machine(cost_model: CostModel = A_MS_A_TOKEN, **settings: object) -> Machine:
    kv_tokens = settings.pop("kv_tokens", MACHINE.kv_tokens)
    changed = MACHINE.settings.model_copy(update=settings)
    return replace(MACHINE, cost_model=cost_model, kv_tokens=kv_tokens, settings=changed)  # type: ignore[arg-type]  # mypy loses the fields of `changed`


def request(
    arrival_s: float,
    prompt: int,
    output: int,
    tenant: str = "a",
    prefix: str = "",
    prefix_tokens: int = 0,
    max_output: int = 64,
) -> TracedRequest:
    return TracedRequest(arrival_s, prompt, output, tenant, prefix, prefix_tokens, max_output)
