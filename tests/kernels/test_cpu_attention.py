"""The C++ attention against the one-token-at-a-time oracle, on pages full of poison."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.library import CpuLibrary
from kernels.cpu.page_layout import PANELS
from kernels.kv_cache import PagedKVCache
from tests.kernels.batches import assert_near, build_step
from tests.kernels.cpu_builds import attend, in_panels, oracle

DTYPES = [torch.float32, torch.bfloat16]
SLOTS = 64


def check(
    library: CpuLibrary, query_lens: list[int], context_lens: list[int], **shape: Any
) -> None:
    options = {name: shape.pop(name) for name in ("window", "softcap") if name in shape}
    step = build_step(query_lens, context_lens, **shape)
    expected = oracle(step.q, step.kv_cache, step.metadata, **options)
    cache = in_panels(step.kv_cache, step.metadata)
    actual = attend(library, step.q, cache, step.metadata, **options)
    assert actual.dtype == step.q.dtype
    assert_near(actual, expected, step.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_at_page_and_chunk_boundaries(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65, 255, 256, 257]
    check(cpu_library, [1] * len(lengths), lengths, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_whole_prompts(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 65, 130]
    check(cpu_library, lengths, lengths, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch_with_cached_prefixes(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    check(cpu_library, [1, 5, 1, 64, 1, 9], [70, 5, 1, 128, 300, 265], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 16), (9, 3, 64), (8, 1, 48), (5, 5, 80), (4, 2, 128), (7, 1, 32), (32, 1, 16)],
)
def test_any_group_and_head_size(
    cpu_library: CpuLibrary, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    check(
        cpu_library,
        [1, 11, 1],
        [65, 67, 20],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )


@pytest.mark.parametrize("window", [1, 7, 64, 65, 100, 1000])
def test_sliding_window(cpu_library: CpuLibrary, window: int) -> None:
    check(cpu_library, [1, 1, 1, 9, 80], [3, 150, 330, 290, 80], window=window)


def test_pages_outside_the_window_may_be_gone(cpu_library: CpuLibrary) -> None:
    """Nothing is read through their entries, though the chunk that they lie in is."""
    step = build_step([1, 1, 4], [200, 140, 400])
    cache = in_panels(step.kv_cache, step.metadata)
    expected = attend(cpu_library, step.q, cache, step.metadata, window=20)
    for sequence, num_gone in ((0, 2), (1, 1), (2, 5)):
        step.metadata.block_tables[sequence, :num_gone] = 2**31 - 1
    actual = attend(cpu_library, step.q, cache, step.metadata, window=20)
    assert torch.equal(actual, expected)


def test_softcap_with_and_without_window(cpu_library: CpuLibrary) -> None:
    for window in (None, 30):
        check(cpu_library, [1, 1, 9, 70], [65, 130, 73, 70], softcap=5.0, window=window)


def test_extreme_scores_neither_overflow_nor_vanish(cpu_library: CpuLibrary) -> None:
    step = build_step([1, 3], [300, 70])
    step.q.mul_(1e4)
    expected = oracle(step.q, step.kv_cache, step.metadata)
    cache = in_panels(step.kv_cache, step.metadata)
    assert_near(attend(cpu_library, step.q, cache, step.metadata), expected, torch.float32)


def test_the_reference_agrees(cpu_library: CpuLibrary) -> None:
    step = build_step([1, 3, 20], [130, 70, 20])
    expected = reference.paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=0.25)
    cache = in_panels(step.kv_cache, step.metadata)
    assert_near(attend(cpu_library, step.q, cache, step.metadata), expected, torch.float32)


def test_q_may_be_a_view_of_the_qkv_projection(cpu_library: CpuLibrary) -> None:
    step = build_step([1, 3], [65, 10])
    q = torch.randn(4, 6 * 16 + 64)[:, : 6 * 16].view(4, 6, 16)
    cache = in_panels(step.kv_cache, step.metadata)
    expected = attend(cpu_library, q.contiguous(), cache, step.metadata)
    assert torch.equal(attend(cpu_library, q, cache, step.metadata), expected)


def test_a_long_context_alone_is_split_and_still_right(cpu_library: CpuLibrary) -> None:
    check(cpu_library, [1], [1500], num_heads=2, num_kv_heads=1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 63, 64, 65]), st.integers(0, 300)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, None, 1, 50, 64, 256]),
    st.sampled_from(DTYPES),
)
def test_any_batch(
    cpu_library: CpuLibrary,
    sequences: list[tuple[int, int]],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    query_lens = [n for n, _ in sequences]
    context_lens = [n + cached for n, cached in sequences]
    shape = {"num_heads": 2, "num_kv_heads": 1, "dtype": dtype}
    check(cpu_library, query_lens, context_lens, window=window, **shape)


def metadata_of(**changes: torch.Tensor) -> AttentionMetadata:
    tensors = {
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
        "context_lens": torch.tensor([65, 10], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "positions": torch.tensor([64, 8, 9]),
        "slot_mapping": torch.tensor([64, 136, 137]),
    }
    return AttentionMetadata(**(tensors | changes), max_query_len=2, max_context_len=65)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_start": torch.tensor([0, 1, 4], dtype=torch.int32)},
        {"query_start": torch.tensor([0, 3, 3], dtype=torch.int32)},
        {"query_start": torch.tensor([0, 5, 3], dtype=torch.int32)},
        {"context_lens": torch.tensor([65, 1], dtype=torch.int32)},
        {"context_lens": torch.tensor([65, 129], dtype=torch.int32)},
        {"block_tables": torch.tensor([[0, 4], [2, 3]], dtype=torch.int32)},
        {"block_tables": torch.tensor([[-1, 1], [2, 3]], dtype=torch.int32)},
    ],
)
def test_what_would_lead_outside_an_array_is_refused(
    cpu_library: CpuLibrary, changes: dict[str, torch.Tensor]
) -> None:
    cache = PagedKVCache(1, 4, 2, 16, torch.float32, "cpu", layout=PANELS)
    q = torch.randn(3, 6, 16)
    assert torch.equal(attend(cpu_library, q, cache, metadata_of()), torch.zeros(3, 6, 16))
    with pytest.raises(ValueError, match="attention:"):
        attend(cpu_library, q, cache, metadata_of(**changes))
