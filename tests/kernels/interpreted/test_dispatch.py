"""What a GPU that our kernels refuse gets: one clear sentence, and the right result."""

import pytest
import torch

from kernels import reference, triton_support
from kernels.attention_tile import has_registers_for
from kernels.gated_activation import silu_and_mul
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.triton_support import runs_triton, why_not_triton
from tests.kernels.batches import assert_near, build_step


@pytest.mark.parametrize("capability", [(7, 5)])
def test_an_old_gpu_says_so_once_and_runs_torch(
    caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    step = build_step([1, 9], [70, 30])
    arguments = (step.q, step.kv_cache, 0, step.metadata)
    expected = reference.paged_attention(*arguments, scale=0.25)
    for _ in range(2):
        assert_near(paged_attention(*arguments, scale=0.25), expected, torch.float32)
    x = torch.randn(3, 8)
    assert_near(rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5), torch.float32)
    assert [record.message for record in caplog.records] == [
        "cpu: this GPU has compute capability 7.5 and the Triton kernels need 8.0 or later: "
        "plain torch operations run instead, slower"
    ]


def test_a_data_type_without_kernels_says_so_and_runs_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert_near(silu_and_mul(x), reference.silu_and_mul(x), torch.float32)
    assert "the Triton kernels have no float64, only bfloat16, float16 and float32" in caplog.text


def test_fp32_heads_too_many_for_registers_run_torch_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_registers_for.cache_clear()
    step = build_step([1, 3], [70, 30], num_heads=17, num_kv_heads=1, head_dim=8)
    arguments = (step.q, step.kv_cache, 0, step.metadata)
    expected = reference.paged_attention(*arguments, scale=0.25)
    assert_near(paged_attention(*arguments, scale=0.25), expected, torch.float32)
    assert "no float32 attention for 17 query heads of one KV head" in caplog.text
    assert has_registers_for(torch.float16, 17)


def test_without_triton_a_gpu_runs_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_support, "HAS_TRITON", False)
    assert not runs_triton(torch.zeros(1))
    assert "Triton is not installed" in caplog.text


def test_supported_ones_are_not_refused() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert why_not_triton((8, 0), dtype) is None
        assert runs_triton(torch.zeros(1, dtype=dtype))
