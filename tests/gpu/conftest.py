"""Tests that need a CUDA GPU; `python -m infra.gpu_check` runs them there."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    return torch.device("cuda")
