"""Learns how a transformers model attends, from one forward pass with a recording attention.

transformers asks a registry for its attention and for its masks. The recorder stands in for both:
it sees every call's heads, scale, window, softcap and sinks, and the *function* behind each mask,
which is then asked about positions far beyond what a short prompt reaches. What our kernels could
not compute exactly is a reason for another tier; no model is recognised by its name.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine.models.layered_kv_cache import LayerShape
from engine.models.original import Original

HOOK = "ncompass"
"""The attention's name in the registry. No mask function is registered by it: masks are then left
out, and registering even an empty one costs a host synchronisation in every forward pass."""
RECORDER = "ncompass-recorder"
TAP = "ncompass_tap"
"""Attribute by which an attention module finds whom to hand its queries to."""
NUM_TOKENS = 9
FAR_POSITIONS = (0, 1, 2, 63, 64, 1000, 2047, 2048, 4096, 8191, 8192, 8193, 40_000)
HARMLESS = {"position_ids", "cache_position", "position_embeddings", "is_causal", "use_cache"}
"""Tensors and flags that models pass along although the attention does not need them."""


class Tap(Protocol):
    """Computes attention for the modules that it is set on."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D_v]."""


class NotHookable(Exception):
    """The model attends in a way that the paged kernels do not compute. Says how."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of the forward pass, in the order of the calls."""

    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None

    @property
    def cache_shape(self) -> LayerShape:
        """What the KV cache keeps for it."""
        return LayerShape(self.num_kv_heads, max(self.key_dim, self.value_dim), self.dtype)


def register_hooks() -> None:
    """Make our attention known to transformers. May be called again."""
    AttentionInterface.register(HOOK, _attend)
    AttentionInterface.register(RECORDER, _attend)
    AttentionMaskInterface.register(RECORDER, _mark)


def set_tap(model: Original, tap: Tap, attention: str) -> None:
    """Let `tap` compute the attention of this model, under a registered name."""
    for module in model.modules():
        object.__setattr__(module, TAP, tap)
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        raise NotHookable("it computes its attention by itself")


def record_attention(model: Original) -> list[AttentionCall]:
    """Every attention call of one forward pass; raises NotHookable when one cannot be served."""
    register_hooks()
    recorder = _Recorder()
    set_tap(model, recorder, RECORDER)
    text_config = model.config.get_text_config()
    token_ids = torch.arange(NUM_TOKENS, device=model.device)[None] % text_config.vocab_size
    with torch.inference_mode():
        model(input_ids=token_ids, use_cache=False)
    num_layers = getattr(text_config, "num_hidden_layers", 0)
    if len(recorder.calls) < max(1, num_layers):
        raise NotHookable(f"{len(recorder.calls)} of its {num_layers} layers ask for attention")
    _refuse_rope_by_length(model)
    return recorder.calls


@dataclass(slots=True)
class _Recorder:
    calls: list[AttentionCall] = field(default_factory=list)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        where = f"attention call {len(self.calls)}"
        if query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise NotHookable(f"{where} has other keys than its own tokens'")
        if query.shape[1] % key.shape[1]:
            raise NotHookable(f"{where} has {query.shape[1]} heads over {key.shape[1]} KV heads")
        _refuse_options(where, module, options)
        window = options.get("sliding_window")
        _refuse_mask(where, mask, window)
        scale = options.get("scaling")
        self.calls.append(
            AttentionCall(
                module=module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=query.shape[3],
                value_dim=value.shape[3],
                dtype=query.dtype,
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=window,
                softcap=options.get("softcap"),
            )
        )
        batch, num_heads, num_tokens, _ = query.shape
        return value.new_zeros((batch, num_tokens, num_heads, value.shape[3])), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The registered function: leads each module to its tap, so that no global state is needed."""
    tap: Tap = getattr(module, TAP)
    return tap.attend(module, query, key, value, attention_mask, **options)


def _mark(*, mask_function: Any, q_length: int, kv_length: int, **options: Any) -> torch.Tensor:
    """A stand-in for a mask, which remembers the function that the mask would be built from."""
    marker = torch.zeros((1, 1, int(q_length), int(kv_length)), dtype=torch.bool)
    marker.ncompass_mask_function = mask_function  # type: ignore[attr-defined]  # a tensor takes it
    return marker


def _refuse_options(where: str, module: torch.nn.Module, options: dict[str, Any]) -> None:
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise NotHookable(f"{where} is not causal")
    served = {"scaling", "sliding_window", "softcap", "s_aux", "dropout"}
    for name, option in options.items():
        if name not in served | HARMLESS and isinstance(option, torch.Tensor):
            raise NotHookable(f"{where} passes {name}, which the kernels do not know")


def _refuse_mask(where: str, mask: torch.Tensor | None, window: int | None) -> None:
    """Compare the mask's own function with what the kernel would let a token see."""
    if mask is None:
        return
    function = getattr(mask, "ncompass_mask_function", None)
    if function is None:
        raise NotHookable(f"{where} has a mask of its own making")
    edges = () if window is None else (window - 1, window, window + 1, 2 * window)
    positions = sorted({*FAR_POSITIONS, *edges})
    zero = torch.zeros((), dtype=torch.int64)
    for q in positions:
        for kv in positions:
            try:
                is_seen = bool(function(zero, zero, torch.tensor(q), torch.tensor(kv)))
            except IndexError:
                raise NotHookable(f"{where} has a mask that depends on the prompt") from None
            is_expected = kv <= q and (window is None or kv > q - window)
            if is_seen != is_expected:
                sees = "sees" if is_seen else "does not see"
                raise NotHookable(f"{where}: position {q} {sees} {kv}, which is no plain window")


def _refuse_rope_by_length(model: Original) -> None:
    """Rotary angles that depend on the longest sequence differ in a batch of many."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise NotHookable(f"its rotary positions ({kind}) depend on the longest sequence")
