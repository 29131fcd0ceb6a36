"""Caches filled with random tokens and poison, as every attention test needs them."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20261130)
    yield
    torch.set_num_threads(before)
