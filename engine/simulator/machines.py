"""How long a step takes: the clock of a simulation.

A machine is the cost model that a worker calibrates and publishes: for this CPU as it was measured,
for a GPU a roofline of effective rates (not peaks). The planner is told the same model that the clock
runs by, so a simulation has no surprises of timing in it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import MachineUnknown
from engine.messages import CostModel
from engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica's hardware with its model, and how the engine is set up for it."""

    name: str
    cost_model: CostModel
    kv_tokens: int
    """Size of the KV cache."""
    context_length: int
    """The longest sequence of the model."""
    settings: EngineSettings = field(default_factory=EngineSettings)

    def alone_s(self, num_tokens: int, num_cached: int) -> float:
        """Least seconds of a prefill that has the machine for itself."""
        model = self.cost_model
        arithmetic_s = model.work_s(num_tokens, num_cached) - model.per_token_s * num_tokens
        return model.base_s + model.products_s(num_tokens) + arithmetic_s


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a GPU does per second in practice, and the KV cache that fits beside the weights."""

    flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    kv_tokens: int


PARAMETERS = 8.03e9
WEIGHT_BYTES = 16.06e9
KV_BYTES_PER_TOKEN = 131_072
ATTENTION_FLOPS_PER_PAIR = 4 * 32 * 32 * 128
"""4 · layers · query heads · head size."""
LAUNCH_S = 1.2e-3
OVERLAP = 0.85
"""Near the ridge a step takes 15 % longer than the greater of its two roofs."""

GPU_RATES = {
    "h100": _Rates(6.5e14, 4.0e14, 2.9e12, kv_tokens=420_000),
    "h200": _Rates(6.5e14, 4.0e14, 4.1e12, kv_tokens=840_000),
    "a100": _Rates(2.4e14, 1.6e14, 1.65e12, kv_tokens=420_000),
}
"""About 65 % of the peak in products (75 % on the A100) and 85 % in memory."""

GPU_SETTINGS = EngineSettings(
    max_running=1024,
    max_step_tokens=8192,
    step_s=0.03,
    idle_step_s=0.06,
    gap_s=0.2,
    pace_s=0.05,
    take_window=64,
)
"""The balance of a step on a data-centre GPU: steps of tens of milliseconds."""


def _gpu(name: str, rates: _Rates) -> Machine:
    """Llama-3.1-8B in bf16 on one GPU."""
    cost_model = CostModel(
        base_s=LAUNCH_S,
        per_token_s=2 * PARAMETERS / rates.flops_per_s,
        per_prefill_context_s=ATTENTION_FLOPS_PER_PAIR / rates.attention_flops_per_s,
        per_decode_context_s=KV_BYTES_PER_TOKEN / rates.bytes_per_s,
        weights_s=WEIGHT_BYTES / rates.bytes_per_s,
        overlap=OVERLAP,
    )
    return Machine(name, cost_model, rates.kv_tokens, 131_072, GPU_SETTINGS)


PRESETS: dict[str, Machine] = {name: _gpu(name, rates) for name, rates in GPU_RATES.items()}
"""Llama-3.1-8B in bf16 on one GPU each, by name."""


class _MachineFile(msgspec.Struct):
    """The fields of a worker's heartbeat that matter here; it may have all the others too."""

    cost_model: CostModel
    total_kv_tokens: Annotated[int, msgspec.Meta(ge=256)]
    context_length: Annotated[int, msgspec.Meta(ge=2)]
    dtype: str = ""
    model: str = ""


def read_machine(name: str) -> Machine:
    """A preset by name, or a JSON file in the form of a heartbeat. Raises MachineUnknown."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.exists():
        presets = ", ".join(PRESETS)
        raise MachineUnknown(f"{name} is neither a machine ({presets}) nor a file")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_MachineFile)
    except OSError as fault:
        raise MachineUnknown(f"{path} cannot be read: {fault.strerror}") from fault
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise MachineUnknown(f"{path}: {fault}") from fault
    return calibrated(
        " ".join(part for part in (found.model, found.dtype) if part) or path.name,
        found.cost_model,
        kv_tokens=found.total_kv_tokens,
        context_length=found.context_length,
    )


def calibrated(name: str, cost_model: CostModel, *, kv_tokens: int, context_length: int) -> Machine:
    """A machine by its cost model. Raises MachineUnknown where that makes no sense."""
    factors = msgspec.structs.astuple(cost_model)
    if min(factors) < 0 or cost_model.per_token_s <= 0 or cost_model.overlap > 1:
        raise MachineUnknown(f"{name}: a cost model with negative seconds, or with none per token")
    return Machine(name, cost_model, kv_tokens, context_length)
