"""Sampling from peaked logits, held against reading the logits once.

python -m kernels.benchmarks.sampling [--device cuda] [--dtype bf16]
"""

from __future__ import annotations

import torch

from kernels.benchmarks.limits import Setting, open_setting
from kernels.sampling import SamplingBatch, sample

VOCABULARY = 49152
BATCHES = (1, 64)
# temperature, top_k, top_p, min_p; at temperature 3 the kept set is too large for the candidates
MODES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_p": (1.0, 0, 0.95, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "flat top_p": (3.0, 0, 0.95, 0.0),
}


def measure(setting: Setting, name: str, batch: int) -> None:
    """One call for `batch` rows that all sample in the same way."""
    temperature, top_k, top_p, min_p = MODES[name]
    logits = (5 * torch.randn(batch, VOCABULARY, device=setting.device)).to(setting.dtype)
    sampling = SamplingBatch.build(
        temperature=[temperature] * batch,
        top_k=[top_k] * batch,
        top_p=[top_p] * batch,
        min_p=[min_p] * batch,
        seeds=list(range(batch)),
        positions=[0] * batch,
        device=setting.device,
    )
    setting.report(
        f"{name} {batch} x {VOCABULARY}", lambda: sample(logits, sampling), num_bytes=logits.nbytes
    )


if __name__ == "__main__":
    opened = open_setting(__doc__)
    for mode in MODES:
        for rows in BATCHES:
            measure(opened, mode, rows)
