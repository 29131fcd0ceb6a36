"""Which tier runs a checkpoint: the fastest whose logits are those of the original.

1. fused: our own modules, for the structure that `decoder_config` recognises
2. attention hook: transformers' modules over our paged KV cache
3. own cache: transformers' modules and cache, a sequence at a time
"""

from pathlib import Path

import torch

from engine.errors import ModelRefused
from engine.models.decoder import load_decoder
from engine.models.model import Model
from engine.models.report import FUSED, LoadReport
from kernels.linear import Quantization


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> tuple[Model, LoadReport]:
    """Load a checkpoint into the fastest tier that is right. Raises ModelRefused.

    Quantised weights exist in the first tier only.
    """
    try:
        decoder = load_decoder(directory, dtype, device, quantization)
    except ModelRefused as refusal:
        if quantization != "none":
            raise
        not_fused = refusal.message
    else:
        return decoder, LoadReport(FUSED, "", quantization=quantization)
    from engine.models.foreign import load_with_transformers  # noqa: PLC0415  # takes seconds

    return load_with_transformers(directory, dtype, device, not_fused)
