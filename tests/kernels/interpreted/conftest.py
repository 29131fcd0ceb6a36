"""Triton's interpreter in the place of a GPU. `test_triton.py` starts these tests.

In a process of their own: TRITON_INTERPRET must be set before Triton is imported. The public calls
are told that they run on an H100, so they launch what they would launch there. fp32 and fp16 only:
the interpreter computes bf16 products wrongly (it multiplies the raw bits).
"""

import os
from collections.abc import Iterator

import pytest

IS_WANTED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_WANTED:
    import triton  # noqa: F401  (before our kernels, which leave it alone where there is no CUDA)

from kernels import triton_support  # noqa: E402

collect_ignore_glob = [] if IS_WANTED else ["test_*.py"]


@pytest.fixture
def capability() -> tuple[int, int]:
    return (9, 0)


@pytest.fixture(autouse=True)
def on_a_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_support, "gpu_capability", lambda device: capability)
    triton_support._accepts.cache_clear()
    yield
    triton_support._accepts.cache_clear()
