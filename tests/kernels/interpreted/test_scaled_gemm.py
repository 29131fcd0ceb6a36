"""Products of 8-bit numbers against float64 on the very numbers, and against the plain product."""

import pytest
import torch

from kernels.scaled_gemm import (
    Kind,
    ScaledWeight,
    quantise_rows,
    quantise_rows_with_torch,
    scaled_linear,
)
from tests.kernels.batches import assert_near

KINDS: list[Kind] = ["int8", "fp8"]
SHAPES = [(1, 7, 48), (3, 130, 304), (17, 5, 129), (0, 4, 16)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_quantised_to_the_nearest(shape: tuple[int, int, int], kind: Kind) -> None:
    x = torch.randn(shape[0], shape[2] + 3)[:, : shape[2]] * 5
    if shape[0] > 1:
        x[1] = 0
    values, scales = quantise_rows(x, kind)
    expected, expected_scales = quantise_rows_with_torch(x, kind)
    torch.testing.assert_close(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())
    if shape[0] > 1:
        assert not values[1].float().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_those_of_the_8_bit_numbers(
    shape: tuple[int, int, int], dtype: torch.dtype, kind: Kind
) -> None:
    num_rows, out_features, in_features = shape
    x, weight = torch.randn(num_rows, in_features), torch.randn(out_features, in_features)
    x, scaled = (x / in_features**0.5).to(dtype), ScaledWeight.quantise(weight, kind)
    bias = torch.randn(out_features).to(dtype)
    values, scales = quantise_rows_with_torch(x, kind)
    expected = values.double() @ scaled.values.double().T * scales[:, None] * scaled.scales
    assert_near(scaled_linear(x, scaled), expected, dtype)
    out = scaled_linear(x, scaled, bias)
    assert_near(out, expected + bias.double(), dtype)
    plain = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.double(), plain, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("capability", [(8, 0)])
def test_a_gpu_without_8_bit_floats_widens_the_weight(
    caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    from kernels.triton_support import multiplies_float8

    multiplies_float8.cache_clear()
    x, weight = torch.randn(3, 20), torch.randn(5, 20)
    out = scaled_linear(x, ScaledWeight.quantise(weight, "fp8"))
    torch.testing.assert_close(out, x @ weight.T, atol=0.6, rtol=0.1)
    assert "8-bit floats need 8.9 or later" in caplog.text
    multiplies_float8.cache_clear()
