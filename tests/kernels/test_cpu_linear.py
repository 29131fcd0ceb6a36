"""The packed matrix product against float64, for every kind of shape and dtype."""

import pytest
import torch

from kernels.cpu.library import CpuLibrary

DTYPES = [torch.float32, torch.bfloat16]


def bound(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounding that x W^T may show: of the sum in fp32, of the inputs and the result in bf16."""
    magnitude = x.double().abs() @ weight.double().abs().T
    return magnitude * (2e-6 if dtype == torch.float32 else 2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16, 17, 63, 300])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(576, 960), (130, 77), (257, 1), (1, 50)]
)
def test_any_shape(
    cpu_library: CpuLibrary,
    dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    out_features: int,
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    x = torch.randn(num_rows, in_features).to(dtype)
    out = cpu_library.linear(x, cpu_library.pack(weight))
    expected = x.double() @ weight.double().T
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= bound(x, weight, dtype) + 1e-30).all()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [3, 40])
def test_bias_and_residual_are_added_in_any_mix_of_dtypes(
    cpu_library: CpuLibrary,
    weight_dtype: torch.dtype,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    num_rows: int,
) -> None:
    weight = torch.randn(100, 96).to(weight_dtype)
    x = torch.randn(num_rows, 96).to(x_dtype)
    bias = torch.randn(100)
    residual = torch.randn(num_rows, 120).to(residual_dtype)[:, 20:]
    out = cpu_library.linear(x, cpu_library.pack(weight), bias, residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    assert out.dtype == residual_dtype
    is_exact = weight_dtype == x_dtype == residual_dtype == torch.float32
    dtype = torch.float32 if is_exact else torch.bfloat16
    assert ((out.double() - expected).abs() <= bound(x, weight, dtype) + 0.02).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_x_may_have_a_row_stride(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    weight = cpu_library.pack(torch.randn(64, 48).to(dtype))
    wide = torch.randn(20, 100).to(dtype)
    out = cpu_library.linear(wide[:, 30:78], weight)
    assert torch.equal(out, cpu_library.linear(wide[:, 30:78].contiguous(), weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_the_output_are_left_alone(
    cpu_library: CpuLibrary, dtype: torch.dtype
) -> None:
    """The last panel is padded, the memory behind the result is not ours."""
    x = torch.randn(5, 34).to(dtype)
    weight = cpu_library.pack(torch.randn(50, 34).to(dtype))
    guarded = torch.full((7, 50), 7.0).to(dtype)
    expected = cpu_library.linear(x, weight)
    cpu_library.call(
        "linear",
        *(5, 50, 34, x.data_ptr(), 34, DTYPES.index(dtype)),
        *(weight.pointer, weight.form, None, None, 0, guarded[1].data_ptr(), DTYPES.index(dtype)),
    )
    assert torch.equal(guarded[1:6], expected)
    assert bool((guarded[0] == 7).all())
    assert bool((guarded[6] == 7).all())


@pytest.mark.parametrize("num_rows", [1, 30])
def test_the_result_may_be_wider_than_the_weight(cpu_library: CpuLibrary, num_rows: int) -> None:
    weight = torch.randn(100, 96).bfloat16()
    x = torch.randn(num_rows, 96).bfloat16()
    out = cpu_library.linear(x, cpu_library.pack(weight), dtype=torch.float32)
    expected = x.double() @ weight.double().T
    assert out.dtype == torch.float32
    assert ((out.double() - expected).abs() <= bound(x, weight, torch.float32)).all()


def test_no_rows_give_no_rows(cpu_library: CpuLibrary) -> None:
    weight = cpu_library.pack(torch.randn(50, 34))
    assert cpu_library.linear(torch.empty(0, 34), weight).shape == (0, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(130, 576), (77, 131), (1, 1)])
def test_rows_of_a_packed_weight_are_read_as_they_were(
    cpu_library: CpuLibrary, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    packed = cpu_library.pack(weight)
    rows = torch.randint(0, out_features, (70,))
    rows[0], rows[1] = 0, out_features - 1
    assert torch.equal(cpu_library.unpack_rows(packed, rows), weight[rows].float())
    assert cpu_library.unpack_rows(packed, rows[:0]).shape == (0, in_features)
    for beyond in (-1, out_features):
        with pytest.raises(ValueError, match="beyond the weight"):
            cpu_library.unpack_rows(packed, torch.tensor([0, beyond]))


def test_rows_of_integers_are_not_read_for_what_they_were(cpu_library: CpuLibrary) -> None:
    packed = cpu_library.pack(torch.randn(60, 48), "int8")
    with pytest.raises(ValueError, match="integers"):
        cpu_library.unpack_rows(packed, torch.tensor([0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [96, 130, 1536])
def test_a_row_has_the_same_bits_in_every_batch(
    cpu_library: CpuLibrary, dtype: torch.dtype, in_features: int
) -> None:
    weight = cpu_library.pack(torch.randn(100, in_features).to(dtype))
    x = torch.randn(600, in_features).to(dtype)
    whole = cpu_library.linear(x, weight)
    for first, last in ((0, 1), (5, 7), (0, 8), (3, 12), (100, 164), (7, 350)):
        assert torch.equal(cpu_library.linear(x[first:last], weight), whole[first:last])
