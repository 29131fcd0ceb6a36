"""Which tier runs a checkpoint: the fastest whose logits are those of the original.

1. fused: our own modules, for the structure that `decoder_config` recognises
2. attention hook: transformers' modules over our paged KV cache
3. own cache: transformers' modules and cache, a sequence at a time
"""

import importlib
from pathlib import Path
from types import ModuleType

import torch

from engine.errors import ModelRefused
from engine.models.decoder import Decoder, load_decoder
from engine.models.model import Model
from engine.models.report import FUSED, Check, LoadReport
from kernels.kv_cache import FLOAT8
from kernels.linear import Quantization


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    *,
    verify_fused: bool = False,
    cache: Path | None = None,
    is_kv_float8: bool = False,
) -> tuple[Model, LoadReport]:
    """Load a checkpoint into the fastest tier that is right. Raises ModelRefused.

    Quantised weights and KV caches of 8-bit floats exist in the first tier only. The other tiers
    are always held against the original; `verify_fused` does it for the first as well, which loads
    the original beside it. What quantising finds out about the checkpoint is kept in `cache`.
    """
    checks: tuple[Check, ...] = ()
    try:
        kv_dtype = FLOAT8 if is_kv_float8 else None
        decoder = load_decoder(
            directory, dtype, device, quantization, cache=cache, kv_dtype=kv_dtype
        )
    except ModelRefused as refusal:
        if quantization != "none":
            raise
        if is_kv_float8:
            raise ModelRefused(
                f"only models of the fused tier have an 8-bit KV cache: {refusal.message}",
                setting="kv_cache_dtype",
            ) from refusal
        not_fused = refusal.message
    else:
        if verify_fused and quantization == "none" and not is_kv_float8:
            checks = _foreign().checks_of_fused(decoder, directory, dtype, device)
        if all(check.is_passed for check in checks):
            return decoder, LoadReport(
                FUSED, "", checks, quantization, kv_cache=_kv_cache_notice(decoder)
            )
        not_fused = "fused, its logits differ: " + ", ".join(map(str, checks))
    loaded: tuple[Model, LoadReport]
    loaded = _foreign().load_with_transformers(directory, dtype, device, not_fused)
    return loaded


def _kv_cache_notice(decoder: Decoder) -> str:
    if decoder.kv_scales is None:
        return ""
    slower = ", in plain torch: slower than an exact one" if decoder.device.type == "cpu" else ""
    return f"{decoder.kv_scales}{slower}"


def _foreign() -> ModuleType:
    """Imported where it is needed: transformers takes seconds."""
    return importlib.import_module("engine.models.foreign")
