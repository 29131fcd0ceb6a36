"""Norm, rotary, activation and linear against their formulas and against transformers' own."""

import pytest
import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import FLOAT8, PagedKVCache
from kernels.linear import PackedLinear, linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv
from tests.kernels.batches import assert_near
from tests.kernels.rotary_checks import check_norms_and_float8

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 576), (5, 123), (3, 4, 64), (0, 32), (2, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert_near(actual, reference.rms_norm(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_rms_norm_of_large_fp16_values_does_not_overflow() -> None:
    x = torch.full((1, 64), 30000.0, dtype=torch.float16)
    assert_near(rms_norm(x, torch.ones(64).half(), 1e-5), torch.ones(1, 64), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    copies = x.clone(), residual.clone()
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, (residual.double() + x.double()).to(dtype))
    assert_near(normed, reference.rms_norm(new_residual, weight, 1e-5), dtype)
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])


def test_add_rms_norm_keeps_a_wide_residual_wide() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.ones(32).bfloat16()
    normed, residual = add_rms_norm(x, torch.randn(3, 32), weight, 1e-5)
    assert (normed.dtype, residual.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 246), (0, 8), (3, 3072)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 3).to(dtype)
    actual = silu_and_mul(gate_up)
    assert actual.dtype == dtype
    assert_near(actual, reference.silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_with_bias_and_residual(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(7, 24).to(dtype) / 5
    bias = torch.randn(7).to(dtype) if has_bias else None
    residual = torch.randn(5, 7).to(dtype)
    packed = PackedLinear(weight, bias)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    before = residual.clone()
    assert_near(linear(x, packed), expected, dtype)
    assert_near(linear(x, packed, residual=residual), expected + residual.double(), dtype)
    assert torch.equal(residual, before)


def rotary_step(num_tokens: int) -> tuple[PagedKVCache, AttentionMetadata, torch.Tensor]:
    cache = PagedKVCache(2, 4, 2, 16, torch.float32, "cpu")
    metadata = AttentionMetadata.build(
        query_lens=[num_tokens - 1, 1], context_lens=[70, 3], block_tables=[[2, 0], [3]]
    )
    return cache, metadata, torch.randn(num_tokens, (5 + 2 + 2) * 16)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_rotates_q_in_place_and_writes_k_and_v(rotary_dim: int) -> None:
    cache, metadata, projection = rotary_step(9)
    original = projection.clone()
    q, k, v = (part.view(9, -1, 16) for part in projection.split([80, 32, 32], dim=-1))
    q0, k0, v0 = q.clone(), k.clone(), v.clone()
    rotary_and_write_kv(q, k, v, build_cos_sin(128, rotary_dim, 1e4), cache, 1, metadata)
    positions = metadata.positions.tolist()
    assert positions == [*range(62, 70), 2]
    assert_near(q, reference.rotate(q0, positions, 1e4, rotary_dim), torch.float32)
    assert torch.equal(projection[:, 80:], original[:, 80:])  # k and v stay as they are
    keys, values = cache.gather(1, torch.tensor([2, 0]), 70)
    rotated = reference.rotate(k0, positions, 1e4, rotary_dim)
    assert_near(keys[:, 62:], rotated[:8].transpose(0, 1), torch.float32)
    assert torch.equal(values[:, 62:], v0[:8].transpose(0, 1))
    assert_near(cache.keys[1][3, :, 2], rotated[8], torch.float32)
    assert not cache.keys[0].any()  # the other layer
    assert int((cache.values[1] != 0).sum()) == 9 * 32  # nothing beside the nine tokens


def test_rotary_does_not_write_tokens_with_slot_minus_one() -> None:
    cache, metadata, projection = rotary_step(9)
    metadata.slot_mapping[3] = -1
    q, k, v = (part.view(9, -1, 16) for part in projection.split([80, 32, 32], dim=-1))
    rotary_and_write_kv(q, k, v, build_cos_sin(128, 16, 1e4), cache, 0, metadata)
    assert int((cache.values[0] != 0).sum()) == 8 * 32
    assert not cache.values[0][0, :, 1].any()  # position 65 is token 3


@pytest.mark.parametrize("kv_dtype", [FLOAT8, None])
@pytest.mark.parametrize(("rotary_dim", "value_dim"), [(16, 16), (8, 24)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_after_norms_into_a_cache_of_any_type(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, rotary_dim: int, value_dim: int
) -> None:
    check_norms_and_float8(dtype, kv_dtype or dtype, rotary_dim, value_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_is_near_the_plain_one(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype) / 8, torch.randn(7, 64).to(dtype)
    residual = torch.randn(5, 7)
    packed = PackedLinear(weight, quantization="int8")
    assert packed.num_bytes == 7 * 64 + 4 * 7
    expected = x.double() @ weight.double().T + residual.double()
    actual = linear(x, packed, residual=residual)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=0.06, rtol=0.02)


SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_cos_sin_equals_that_of_transformers(scaling: dict[str, object] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 1, 17, 4095, 20000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = build_cos_sin(20001, 64, 5e5, scaling)[positions]
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], rtol=0, atol=2e-7)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], rtol=0, atol=2e-7)


def test_unknown_rotary_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'longrope' is not supported"):
        build_cos_sin(16, 16, 1e4, {"rope_type": "longrope"})
