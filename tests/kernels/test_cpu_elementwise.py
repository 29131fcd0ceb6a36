"""RMSNorm, SwiGLU and rotary embedding in C++ against the oracles."""

import pytest
import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import attention as cpu_attention
from kernels.cpu.library import CpuLibrary
from kernels.cpu.page_layout import PANELS
from kernels.kv_cache import PagedKVCache
from kernels.rotary import build_cos_sin
from tests.kernels.batches import assert_near

DTYPES = [torch.float32, torch.bfloat16]
# Angles are products in fp32: at position 120 their rounding alone is worth 4e-6.
ANGLE_TOLERANCE = 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (100, 130), (2, 5, 64)])
def test_rms_norm(cpu_library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1]).to(dtype)
    out = cpu_library.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert_near(out, reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_add_rms_norm_keeps_the_residual_in_its_own_dtype(
    cpu_library: CpuLibrary, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    x, weight = torch.randn(50, 130).to(dtype), torch.randn(130).to(dtype)
    residual = torch.randn(50, 130).to(residual_dtype)
    before = residual.clone()
    out, total = cpu_library.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    assert total.dtype == residual_dtype
    assert_near(total, before.double() + x.double(), residual_dtype)
    assert_near(out, reference.rms_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_at_both_ends_of_the_range(
    cpu_library: CpuLibrary, dtype: torch.dtype
) -> None:
    gate_up = torch.randn(90, 2 * 77)
    gate_up[0, :6] = torch.tensor([-200.0, -89.0, -88.0, 0.0, 88.0, 3e38])
    gate_up = gate_up.to(dtype)
    gate_up[:, 77:] = gate_up[:, 77:].clamp(-1, 1)
    out = cpu_library.silu_and_mul(gate_up)
    assert_near(out[1:], reference.silu_and_mul(gate_up)[1:], dtype)
    edge = reference.silu_and_mul(gate_up)[0]
    torch.testing.assert_close(out[0].double(), edge, atol=1e-5, rtol=1e-2)


def assert_near_angle(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        assert (actual.double() - expected).abs().max() < ANGLE_TOLERANCE
    else:
        assert_near(actual, expected, dtype)


def step_of(num_tokens: int) -> AttentionMetadata:
    """One prefill from position 50 on, over three scattered pages."""
    return AttentionMetadata.build(
        query_lens=[num_tokens], context_lens=[50 + num_tokens], block_tables=[[3, 0, 2]]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (16, 16), (48, 20), (128, 64)])
def test_rotary_writes_rotated_keys_and_plain_values(
    cpu_library: CpuLibrary,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
) -> None:
    num_tokens, metadata = 70, step_of(70)
    metadata.slot_mapping[5] = -1
    projection = torch.randn(num_tokens, 8, head_dim).to(dtype)
    q, k, v = projection.split([4, 2, 2], dim=1)
    before = projection.clone()
    cache = PagedKVCache(2, 4, 2, head_dim, cache_dtype, "cpu", layout=PANELS)
    table = build_cos_sin(200, rotary_dim, 1e4)
    cpu_attention.rotary_and_write_kv(cpu_library, q, k, v, table, cache, 1, metadata)

    positions = metadata.positions.tolist()
    rotated_q = reference.rotate(before[:, :4], positions, 1e4, rotary_dim)
    rotated_k = reference.rotate(before[:, 4:6], positions, 1e4, rotary_dim)
    assert_near_angle(q, rotated_q, dtype)
    assert torch.equal(projection[:, 4:], before[:, 4:])
    keys, values = cache.gather(1, metadata.block_tables[0], 120)
    written = [t for t in range(num_tokens) if t != 5]
    coarser = torch.bfloat16 if torch.bfloat16 in (dtype, cache_dtype) else torch.float32
    assert_near_angle(keys[:, 50:].transpose(0, 1)[written], rotated_k[written], coarser)
    assert_near(values[:, 50:].transpose(0, 1)[written], before[:, 6:][written], coarser)
    assert not keys[:, 55].any()
    assert not keys[:, :50].any()
    assert not cache.keys[0].any()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("positions", 3, 200), ("positions", 3, -1), ("slot_mapping", 0, 4 * 64)],
)
def test_a_place_outside_the_arrays_is_refused(
    cpu_library: CpuLibrary, name: str, index: int, value: int
) -> None:
    metadata = step_of(10)
    getattr(metadata, name)[index] = value
    q, k = torch.randn(10, 4, 16), torch.randn(10, 2, 16)
    cache = PagedKVCache(1, 4, 2, 16, torch.float32, "cpu", layout=PANELS)
    with pytest.raises(ValueError, match="rotary:"):
        cpu_attention.rotary_and_write_kv(
            cpu_library, q, k, k, build_cos_sin(200, 16, 1e4), cache, 0, metadata
        )
    assert not cache.keys[0].any()
