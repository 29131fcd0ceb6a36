"""What a PEFT adapter's `adapter_config.json` says, and whether it can be added to a model as it is.

Only plain LoRA can be told apart from its base at run time: a product of two small matrices beside
each projection. Whatever else an adapter changes is refused by name. Imports no torch.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
REFUSED_FIELDS = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "lora_bias": "biases in its products (lora_bias)",
    "trainable_token_indices": "tokens of its own (trainable_token_indices)",
    "target_parameters": "parameters that are no modules (target_parameters)",
    "use_qalora": "QALoRA",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activation by a token (aLoRA)",
    "arrow_config": "a router (Arrow)",
}
"""What cannot be added row by row, or not yet; false, null and empty mean that it is not used."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base model's own weights alone."""
ALPHA_MAX = 1e9
"""No adapter comes near it; JSON has integers that no float can hold."""
LITERAL = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter: W + scale · B A for each of its projections."""

    base: str
    """The model that it was trained on, as it calls it; may be empty."""
    alpha: float
    alpha_by_suffix: dict[str, float]
    """Other values of alpha, for the modules whose path ends so."""
    is_rank_stabilised: bool

    def scale(self, module: str, rank: int) -> float:
        """What the product is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA)."""
        found = (a for end, a in self.alpha_by_suffix.items() if f".{module}".endswith(f".{end}"))
        alpha = next(found, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    return (directory / ADAPTER_CONFIG).is_file()


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Raises ModelRefused with one clear sentence."""
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"{directory} has no {ADAPTER_CONFIG}") from None
    except (ValueError, RecursionError) as fault:
        raise ModelRefused(f"{ADAPTER_CONFIG} is not JSON: {fault}") from fault
    if not isinstance(config, dict):
        raise ModelRefused(f"{ADAPTER_CONFIG} is not a JSON object")
    _refuse_unknown(config)
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise ModelRefused(f"{directory} has no {ADAPTER_WEIGHTS}; other formats are not loaded")
    return AdapterConfig(
        base=str(config.get("base_model_name_or_path") or ""),
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        alpha_by_suffix=_alphas(config.get("alpha_pattern") or {}),
        is_rank_stabilised=bool(config.get("use_rslora", False)),
    )


def _refuse_unknown(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelRefused(f"adapters of the type {kind} are not supported, only LORA")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise ModelRefused(f"adapters for the task {task} are not supported, only CAUSAL_LM")
    for field, what in REFUSED_FIELDS.items():
        if config.get(field):
            raise ModelRefused(f"the adapter has {what}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ModelRefused("the adapter changes biases, which is not supported")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise ModelRefused(
            f"the adapter starts from {start} and changes its base's own weights:"
            " convert it to a plain LoRA first"
        )


def _alphas(pattern: object) -> dict[str, float]:
    if not isinstance(pattern, dict):
        raise ModelRefused("the adapter's alpha_pattern is not a JSON object")
    for key in pattern:
        if not LITERAL.fullmatch(key):
            raise ModelRefused(f"the adapter's alpha_pattern has {key!r}, which names no module")
    return {key: _number("alpha_pattern", alpha) for key, alpha in pattern.items()}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= ALPHA_MAX:
        raise ModelRefused(f"the adapter's {name} is no usable number: {str(value)[:20]}")
    return float(value)
