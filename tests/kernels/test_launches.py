"""The static model counts what is really there: by hand, and by the tensors themselves."""

import subprocess
import sys

import pytest
import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.benchmarks.chips import CHIPS, seconds_of
from kernels.benchmarks.launches import (
    AttentionLaunch,
    GatedLaunch,
    LinearLaunch,
    RmsNormLaunch,
    RotaryLaunch,
    SamplingLaunch,
    total_bytes,
    total_operations,
)
from kernels.benchmarks.limits import Limits
from kernels.benchmarks.product_shapes import LLAMA_8B
from kernels.kv_cache import PLAIN, PagedKVCache
from kernels.rms_norm import add_rms_norm
from kernels.rotary import build_cos_sin
from kernels.sampling import sample
from kernels.sampling_batch import SamplingBatch

BF16 = torch.bfloat16


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_rms_norm_counts_its_tensors() -> None:
    x, residual = torch.randn(7, 123, dtype=BF16), torch.randn(7, 123)
    weight = torch.randn(123, dtype=BF16)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    launch = RmsNormLaunch.of(x, weight, residual)
    assert launch.num_bytes == nbytes(x, residual, weight, out, total)
    assert RmsNormLaunch.of(x, weight).num_bytes == nbytes(x, weight, out)


def test_gated_activation_and_linear_count_their_tensors() -> None:
    gate_up = torch.randn(5, 2 * 33, dtype=BF16)
    out = torch.empty(5, 33, dtype=BF16)
    assert GatedLaunch.of(gate_up).num_bytes == nbytes(gate_up, out)

    weight, bias = torch.randn(11, 33, dtype=BF16), torch.randn(11, dtype=BF16)
    product, stream = torch.empty(5, 11, dtype=BF16), torch.empty(5, 11)
    launch = LinearLaunch.of(out, weight, bias)
    assert launch.num_bytes == nbytes(out, weight, bias, product)
    assert launch.num_operations == 2 * 5 * 33 * 11
    added = LinearLaunch.of(out, weight, bias, residual=stream)
    assert added.num_bytes == nbytes(out, weight, bias, product, product, stream, stream)


def test_rotary_counts_its_tensors() -> None:
    cache = PagedKVCache(1, 2, 2, 8, BF16, "cpu", layout=PLAIN)
    q, k, v = (torch.randn(6, heads, 8, dtype=BF16) for heads in (4, 2, 2))
    table = build_cos_sin(128, 8, 1e4)
    places = torch.zeros(6, dtype=torch.int64)
    launch = RotaryLaunch.of(q, k, v, table, cache)
    angles = table[:6]
    expected = nbytes(q, q, k, k, v, v, angles, places, places)
    assert launch.num_bytes == expected
    assert launch.num_operations == 3 * 6 * (4 + 2) * 8


def test_sampling_counts_its_tensors() -> None:
    logits = torch.randn(3, 77, dtype=BF16)
    batch = SamplingBatch.build(
        temperature=[0.0, 1.0, 2.0],
        top_p=[1.0] * 3,
        top_k=[0] * 3,
        min_p=[0.0] * 3,
        seeds=[1, 2, 3],
        positions=[0] * 3,
    )
    asked = (batch.temperature, batch.top_p, batch.top_k, batch.min_p, batch.seeds, batch.positions)
    tokens = sample(logits, batch)
    assert SamplingLaunch.of(logits).num_bytes == nbytes(logits, *asked, tokens)


def paged(query_lens: list[int], context_lens: list[int], window: int | None) -> AttentionLaunch:
    num_pages = [-(-length // 64) for length in context_lens]
    cache = PagedKVCache(1, sum(num_pages), 2, 16, BF16, "cpu", layout=PLAIN)
    metadata = AttentionMetadata.build(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=[list(range(count)) for count in num_pages],
    )
    q = torch.randn(sum(query_lens), 8, 16, dtype=BF16)
    return AttentionLaunch.of(q, cache, metadata, window)


@pytest.mark.parametrize("window", [None, 1, 3, 64, 100, 1000])
@pytest.mark.parametrize("lens", [([1], [1]), ([1, 1], [65, 300]), ([5, 1, 40], [5, 70, 129])])
def test_attention_counts_every_visible_pair(
    lens: tuple[list[int], list[int]], window: int | None
) -> None:
    launch = paged(*lens, window)
    num_pairs, num_seen = 0, 0
    for num_new, length in zip(*lens, strict=True):
        seen: set[int] = set()
        for position in range(length - num_new, length):
            first = 0 if window is None else max(0, position - window + 1)
            seen |= set(range(first, position + 1))
            num_pairs += position - first + 1
        num_seen += len(seen)
    assert launch.num_pairs == num_pairs
    assert launch.num_read_tokens == num_seen
    assert launch.num_operations == 4 * num_pairs * 8 * 16


def test_attention_counts_its_tensors() -> None:
    launch = paged([1, 1], [64, 128], None)
    q = torch.empty(2, 8, 16, dtype=BF16)
    keys = torch.empty(192, 2, 16, dtype=BF16)
    lens, starts, pages = (torch.empty(n, dtype=torch.int32) for n in (2, 3, 3))
    assert launch.num_bytes == nbytes(q, q, keys, keys, lens, starts, pages)


def test_a_decode_step_of_llama_8b_by_hand() -> None:
    launches = LLAMA_8B.step((1,) * 64, (1024,) * 64)
    # the weights of Llama-3.1-8B but for the embedding, of which 64 rows are read
    weights = 8_030_261_248 - 128_256 * 4096
    kv = 64 * 1024 * 2 * 32 * 8 * 128
    read = 2 * (weights + kv)
    assert read < total_bytes(launches) < 1.04 * read, "the rest is activations"
    pairs = 64 * 1024 * 32 * 32 * 128
    products = weights - 65 * 4096  # norms multiply nothing
    assert total_operations(launches) == pytest.approx(2 * 64 * products + 4 * pairs, rel=1e-3)
    # 15.0 GB, 8.6 GB and 0.9 GB at the bandwidth of an H100, 3.35 TB/s
    assert seconds_of(launches, CHIPS["H100"].limits()) == pytest.approx(7.3e-3, rel=0.01)


def test_a_launch_takes_what_its_slower_limit_allows() -> None:
    limits = Limits(bytes_per_s=1e9, operations_per_s=1e12)
    few, many = LinearLaunch(1, 100, 100, 2, 2, 2), LinearLaunch(10_000, 100, 100, 2, 2, 2)
    assert seconds_of([few], limits) == few.num_bytes / 1e9
    assert seconds_of([many], limits) == max(many.num_bytes / 1e9, many.num_operations / 1e12)
    assert seconds_of([few, many], limits) == seconds_of([few], limits) + seconds_of([many], limits)


def test_without_a_gpu_the_benchmark_says_that_nothing_was_measured() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = subprocess.run(
        [sys.executable, "-m", "kernels.benchmarks"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.startswith("No GPU is here: these are predictions")
    assert "Llama-3.1-8B, bf16, one H100" in ran.stdout
    assert "decode 64 x 1024" in ran.stdout
