"""Sampling from peaked logits, held against reading the logits once.

python -m kernels.benchmarks.sampling [--device cuda] [--dtype bf16]
"""

from __future__ import annotations

import torch

from kernels.benchmarks.launches import SamplingLaunch
from kernels.benchmarks.limits import Setting, open_setting
from kernels.benchmarks.product_shapes import LLAMA_8B
from kernels.sampling import sample
from kernels.sampling_batch import SamplingBatch

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


SHARE_MAX = 0.05
"""Of a decode step: what sampling may take on a GPU."""
CONTEXT = 1024


def measure(setting: Setting, name: str, batch: int, vocabulary: int = VOCABULARY) -> float:
    """One call for `batch` rows that all sample in the same way; its seconds."""
    temperature, top_k, top_p, min_p = MODES[name]
    logits = (5 * torch.randn(batch, vocabulary, device=setting.device)).to(setting.dtype)
    sampling = SamplingBatch.build(
        temperature=[temperature] * batch,
        top_k=[top_k] * batch,
        top_p=[top_p] * batch,
        min_p=[min_p] * batch,
        seeds=list(range(batch)),
        positions=[0] * batch,
        device=setting.device,
    )
    return setting.report(
        f"{name} {batch} x {vocabulary}",
        lambda: sample(logits, sampling),
        SamplingLaunch.of(logits),
    )


def measure_share(setting: Setting, name: str, batch: int) -> float:
    """The part of a decode step of Llama-3.1-8B that the draw takes, were all else at its limit."""
    launches = LLAMA_8B.step((1,) * batch, (CONTEXT,) * batch)
    step_s = sum(setting.limits.seconds(each.num_bytes, each.num_operations) for each in launches)
    share = measure(setting, name, batch, LLAMA_8B.vocabulary) / step_s
    verdict = "MISSED" if share > SHARE_MAX else ""
    print(f"  {100 * share:.1f} % of a decode step of {batch} x {CONTEXT} (at most 5 %)  {verdict}")
    return share


def measure_all(setting: Setting) -> None:
    """Every way to sample; on a GPU also beside a whole step."""
    for mode in MODES:
        for rows in BATCHES:
            measure(setting, mode, rows)
    if setting.device.type == "cuda":
        for mode in MODES:
            measure_share(setting, mode, 64)


if __name__ == "__main__":
    measure_all(open_setting(__doc__))
