"""Rotary with norms and with a cache of 8-bit floats: one check for plain torch and for Triton."""

import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import FLOAT8, PLAIN, PagedKVCache
from kernels.rotary import QueryKeyNorms, build_cos_sin, rotary_and_write_kv
from tests.kernels.batches import assert_near


def check_norms_and_float8(
    dtype: torch.dtype, kv_dtype: torch.dtype, rotary_dim: int, value_dim: int
) -> None:
    """q in place; keys and values in the cache, within half a step of 8 bits where it has those."""
    heads, kv_heads, head_dim, num_tokens = 3, 2, 16, 5
    metadata = AttentionMetadata.build(
        query_lens=[num_tokens], context_lens=[67], block_tables=[[2, 0]]
    )
    q = torch.randn(num_tokens, heads, head_dim).to(dtype) * 3
    k = torch.randn(num_tokens, kv_heads, head_dim).to(dtype) * 3
    v = torch.randn(num_tokens, kv_heads, value_dim).to(dtype) * 3
    v[0, 0, 0] = 3e4  # beyond the largest 8-bit float
    norms = QueryKeyNorms(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-5)
    positions = metadata.positions.tolist()
    normed_q = reference.rms_norm(q, norms.query, 1e-5)
    normed_k = reference.rms_norm(k, norms.key, 1e-5)
    expected_q = reference.rotate(normed_q, positions, 1e4, rotary_dim)
    expected_k = reference.rotate(normed_k, positions, 1e4, rotary_dim)
    cache = PagedKVCache(
        *(2, 3, kv_heads, head_dim, kv_dtype, "cpu"), layout=PLAIN, value_dim=value_dim
    )
    cache.key_scales[1] = torch.tensor([0.02, 0.3])
    cache.value_scales[1] = torch.tensor([0.5, 0.04])
    rotary_and_write_kv(q, k, v, build_cos_sin(128, rotary_dim, 1e4), cache, 1, metadata, norms)
    assert_near(q, expected_q, dtype)
    if kv_dtype != FLOAT8:
        keys, values = cache.gather(1, torch.tensor([2, 0]), 67)
        assert_near(keys[:, 62:], expected_k.transpose(0, 1), dtype)
        assert torch.equal(values[:, 62:], v.transpose(0, 1))
        return
    for token, (block, offset) in enumerate([(2, 62), (2, 63), (0, 0), (0, 1), (0, 2)]):
        for head in range(kv_heads):
            assert_near_float8(
                cache.keys[1][block, head, offset],
                expected_k[token, head] / cache.key_scales[1, head],
                dtype,
            )
            assert_near_float8(
                cache.values[1][block, head, offset],
                v[token, head].double() / cache.value_scales[1, head],
                dtype,
            )


def assert_near_float8(stored: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Half a step: 2^-4 of the value, or 2^-10 among the subnormal ones; and at most 448.

    Beside it what plain torch loses where it rounds to `dtype` between norm and rotation.
    """
    assert stored.dtype == FLOAT8
    exact = exact.clamp(-448, 448)
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    allowed = (exact.abs() / 16).clamp(min=2.0**-10) * 1.001 + rounding
    assert ((stored.double() - exact).abs() <= allowed).all()
