"""Products with weights of 8 bits, with activations of 8 bits and without, against float64."""

import pytest
import torch

from kernels import reference
from kernels.cpu.library import CpuLibrary, Quantization

SCHEMES: list[Quantization] = ["int8", "int8_weight_only"]
DTYPES = [torch.float32, torch.bfloat16]


def what_it_stands_for(library: CpuLibrary, x: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """x as the scheme rounds a weight; activations of `int8` are rounded in the same way."""
    group_length = library.group_length(scheme) or x.shape[1]
    return reference.dequantise(*reference.quantise(x, group_length), group_length)


def expected(
    library: CpuLibrary, x: torch.Tensor, weight: torch.Tensor, scheme: Quantization
) -> torch.Tensor:
    rows = what_it_stands_for(library, x, scheme) if scheme == "int8" else x.double()
    return rows @ what_it_stands_for(library, weight, scheme).T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "group_length"), [(576, 192), (130, 64), (77, 77), (1, 1)])
def test_quantise_rounds_as_the_reference(
    cpu_library: CpuLibrary, dtype: torch.dtype, length: int, group_length: int
) -> None:
    x = (torch.randn(9, length + 5) * torch.logspace(-6, 4, 9)[:, None]).to(dtype)[:, 5:]
    x[3] = 0
    integers, scales = cpu_library.quantise(x, group_length)
    wanted, wanted_scales = reference.quantise(x, group_length)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(integers, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 17, 63, 300])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(576, 960), (130, 77), (257, 1), (1, 50), (1536, 64)]
)
def test_any_shape(
    cpu_library: CpuLibrary,
    scheme: Quantization,
    x_dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    out_features: int,
) -> None:
    weight = torch.randn(out_features, in_features)
    x = torch.randn(num_rows, in_features).to(x_dtype)
    out = cpu_library.linear(x, cpu_library.pack(weight, scheme), dtype=torch.float32)
    magnitude = x.double().abs() @ weight.double().abs().T
    limit = magnitude * 4e-6 + 1e-6  # sums of integers are exact, their scaling is not
    assert ((out.double() - expected(cpu_library, x, weight, scheme)).abs() <= limit).all()


@pytest.mark.parametrize("num_rows", [1, 30])
def test_extremes_do_not_saturate(cpu_library: CpuLibrary, num_rows: int) -> None:
    """Every product at its largest, both signs: bytes multiplied in pairs of 16 bits would clip."""
    weight = torch.ones(96, 1536)
    weight[::2] = -1
    x = torch.full((num_rows, 1536), 3.0)
    out = cpu_library.linear(x, cpu_library.pack(weight, "int8"))
    assert torch.allclose(out[:, 1::2], torch.tensor(4608.0), rtol=1e-5)
    assert torch.allclose(out[:, ::2], torch.tensor(-4608.0), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 11, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_is_two_products(
    cpu_library: CpuLibrary,
    scheme: Quantization,
    dtype: torch.dtype,
    num_rows: int,
    has_bias: bool,
) -> None:
    x = torch.randn(num_rows, 130).to(dtype)
    gate, up = (cpu_library.pack((torch.randn(100, 130) / 11).to(dtype), scheme) for _ in range(2))
    biases = [torch.randn(100) if has_bias else None for _ in range(2)]
    out = cpu_library.gated_linear(x, gate, up, *biases)
    gates, ups = (
        cpu_library.linear(x, weight, bias, dtype=torch.float32).double()
        for weight, bias in zip((gate, up), biases, strict=True)
    )
    wanted = torch.nn.functional.silu(gates) * ups
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert out.dtype == dtype
    assert torch.allclose(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("in_features", [96, 130, 1536])
def test_a_row_has_the_same_bits_in_every_batch(
    cpu_library: CpuLibrary, scheme: Quantization, in_features: int
) -> None:
    weight = cpu_library.pack(torch.randn(100, in_features), scheme)
    x = torch.randn(600, in_features).bfloat16()
    whole = cpu_library.linear(x, weight)
    for first, last in ((0, 1), (5, 7), (0, 8), (3, 12), (100, 164), (7, 350)):
        assert torch.equal(cpu_library.linear(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(
    cpu_library: CpuLibrary, poison: float
) -> None:
    weight = cpu_library.pack(torch.randn(50, 300), "int8")
    x = torch.randn(20, 300)
    clean = cpu_library.linear(x, weight)
    x[7, 250] = poison
    out = cpu_library.linear(x, weight)
    assert out[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], clean[others])
