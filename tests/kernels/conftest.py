"""Caches filled with random tokens and poison, as every attention test needs them."""

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import CpuLibrary
from tests.kernels.cpu_builds import VARIANTS, built


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20261130)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native-widened", "native-dot", "avx2"])
def cpu_library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    """The C++ library with two threads, in each form in which it may run."""
    target, is_native = VARIANTS[request.param]
    library = CpuLibrary(built(target), num_threads=2, native_bf16_dot=False)
    if is_native:
        has_dot = library.has_native_bf16_dot
        library.close()
        if not has_dot:
            pytest.skip("this processor has no bf16 dot product")
        library = CpuLibrary(built(target), num_threads=2, native_bf16_dot=True)
    yield library
    library.close()
