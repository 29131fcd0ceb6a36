"""Norms, activations, and rotary with its writes to the cache."""

import pytest
import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import FLOAT8, PLAIN, PagedKVCache
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv
from tests.kernels.batches import assert_near
from tests.kernels.rotary_checks import check_norms_and_float8

DTYPES = [torch.float32, torch.float16]
SHAPES = [(1, 1), (3, 5), (7, 123), (2, 576), (2, 3, 64), (0, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_with_and_without_a_wide_residual(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, residual = torch.randn(shape).to(dtype), torch.randn(shape[-1]), torch.randn(shape)
    weight = weight.to(dtype)
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert_near(total, residual + x, torch.float32)
    assert_near(normed, reference.rms_norm(total, weight, 1e-5), dtype)


def test_rows_may_lie_apart() -> None:
    x, weight = torch.randn(4, 100)[:, :50], torch.randn(50)
    assert_near(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 246), (0, 8), (2, 3072)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape[0], shape[1] + 3) * 3).to(dtype)[:, : shape[1]]
    assert_near(silu_and_mul(gate_up), reference.silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 16, 16), (3, 3, 16, 8), (4, 1, 40, 24), (1, 1, 8, 8)])
def test_rotary_writes_what_it_should_and_nothing_else(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim, rotary_dim = shape
    metadata = AttentionMetadata.build(
        query_lens=[8, 1], context_lens=[70, 3], block_tables=[[2, 0], [3]]
    )
    metadata.slot_mapping[3] = -1
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    projection = torch.randn(9, sum(widths)).to(dtype)
    q, k, v = (part.view(9, -1, head_dim) for part in projection.split(widths, dim=-1))
    positions = metadata.positions.tolist()
    rotated_q = reference.rotate(q, positions, 1e4, rotary_dim)
    rotated_k = reference.rotate(k, positions, 1e4, rotary_dim)
    untouched = projection[:, widths[0] :].clone()
    cache = PagedKVCache(2, 4, kv_heads, head_dim, dtype, "cpu", layout=PLAIN)
    rotary_and_write_kv(q, k, v, build_cos_sin(128, rotary_dim, 1e4), cache, 1, metadata)
    assert_near(q, rotated_q, dtype)
    assert torch.equal(projection[:, widths[0] :], untouched)
    for token, slot in enumerate(metadata.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, 64)
            assert_near(cache.keys[1][block, :, offset], rotated_k[token], dtype)
            assert torch.equal(cache.values[1][block, :, offset], v[token])
    assert int((cache.values[1] != 0).sum()) == 8 * kv_heads * head_dim
    assert not cache.keys[0].any()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kv_dtype", [FLOAT8, None])
@pytest.mark.parametrize(("rotary_dim", "value_dim"), [(16, 16), (8, 24)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_after_norms_into_a_cache_of_any_type(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    rotary_dim: int,
    value_dim: int,
    capability: tuple[int, int],
) -> None:
    check_norms_and_float8(dtype, kv_dtype or dtype, rotary_dim, value_dim)
