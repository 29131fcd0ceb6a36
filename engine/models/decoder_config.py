"""The shape of a Llama-like decoder, from a checkpoint's `config.json`.

Known structure: pre-norm RMSNorm, rotary positions, grouped-query attention with optional biases,
optional query and key norms, optional sliding windows, a SiLU-gated MLP. Llama, Mistral, Qwen2,
Qwen3 and SmolLM2 are of it. Any other value in the config that would change the arithmetic is
refused: a model that is almost right is worse than none.
"""

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelRefused

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that the fused decoder needs to know of its checkpoint."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None sees all."""

    @classmethod
    def parse(cls, config: dict[str, Any]) -> "DecoderConfig":
        """From the JSON object; raises ModelRefused when the structure is not the known one."""
        model_type = str(config.get("model_type"))
        if model_type not in _BIASES:
            raise ModelRefused(
                f"the architecture {model_type} is not supported yet", architecture=model_type
            )
        if config.get("hidden_act", "silu") not in {"silu", "swish"}:
            raise ModelRefused(f"the activation {config['hidden_act']} is not supported yet")
        has_qkv_bias, has_output_bias = _biases(model_type, config)
        hidden_size, num_heads = (
            _count(config, "hidden_size"),
            _count(config, "num_attention_heads"),
        )
        rope_theta, rope_scaling = _rope(config)
        return cls(
            model_type=model_type,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            vocab_size=_count(config, "vocab_size"),
            context_length=_count(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=has_qkv_bias,
            has_output_bias=has_output_bias,
            has_mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
            has_qk_norm=model_type == "qwen3",
            windows=_windows(model_type, config),
        )


_BIASES = {"llama": None, "mistral": (False, False), "qwen2": (True, False), "qwen3": None}
"""(q, k and v; o) by model type; None: `attention_bias` says it for all four."""


def _biases(model_type: str, config: dict[str, Any]) -> tuple[bool, bool]:
    fixed = _BIASES[model_type]
    if fixed is not None:
        return fixed
    has_bias = bool(config.get("attention_bias", False))
    return has_bias, has_bias


def _count(config: dict[str, Any], name: str) -> int:
    number = config.get(name)
    if not isinstance(number, int) or number <= 0:
        raise ModelRefused(f"config.json has no usable {name}: {number!r}")
    return number


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling) from the new `rope_parameters` or the old pair of fields."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise ModelRefused("rotary positions that differ by layer are not supported yet")
    scaling = {"rope_type": parameters.get("rope_type", parameters.get("type", "default"))}
    scaling |= {k: v for k, v in parameters.items() if k not in {"rope_type", "type"}}
    if scaling["rope_type"] not in ROPE_TYPES:
        raise ModelRefused(f"the rope type {scaling['rope_type']} is not supported yet")
    if (
        float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
        != 1
    ):
        raise ModelRefused("partial rotary positions are not supported yet")
    if scaling["rope_type"] == "yarn":
        scaling.setdefault(
            "original_max_position_embeddings", config.get("max_position_embeddings")
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    return float(theta), scaling


def _windows(model_type: str, config: dict[str, Any]) -> tuple[int | None, ...]:
    num_layers = _count(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if not window or model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    first = int(config.get("max_window_layers", 28))
    layer_types = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
