"""Decode and mixed launches against the one-token-at-a-time oracle; poison wherever none may read."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import paged_decode_attention, reference
from kernels.kv_cache import FLOAT8
from kernels.mixed_attention import mixed_with_triton
from kernels.paged_attention import paged_attention
from kernels.tuning import Tile
from tests.kernels.batches import Step, assert_near, build_step

DTYPES = [torch.float32, torch.float16]


def check(step: Step, *, q: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    q = step.q if q is None else q
    arguments = (q, step.kv_cache, 0, step.metadata)
    scale = q.shape[-1] ** -0.5
    expected = reference.paged_attention(*arguments, scale=scale, **options)
    actual = paged_attention(*arguments, scale=scale, **options)
    assert actual.dtype == q.dtype
    assert_near(actual, expected, q.dtype)
    assert not step.metadata.workspace.arrivals(0).any(), "a counter was not taken back to zero"
    return actual


# What a step may look like beside its lengths.
SHAPES: dict[str, dict[str, Any]] = {
    "three heads of 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "a group of 20": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 40},
    "no groups": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "wide keys": {"head_dim": 48, "value_dim": 16},
    "wide values": {"head_dim": 8, "value_dim": 40},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "window 20": {"window": 20},
    "window 64": {"window": 64},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.linspace(-2, 4, 6)},
    "everything": {"window": 30, "softcap": 0.5, "sinks": torch.linspace(-2, 4, 6)},
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_at_page_boundaries(dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129]
    check(build_step([1] * len(lengths), lengths, dtype=dtype))


def test_decode_at_large_scores() -> None:
    step = build_step([1, 1], [66, 130])
    step.q.mul_(300)  # 2^score overflows unless the largest is subtracted
    check(step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_of_any_shape(shape: str, dtype: torch.dtype) -> None:
    check(build_step([1, 1], [5, 130], dtype=dtype, **SHAPES[shape]))


@pytest.mark.parametrize("options", OPTIONS)
def test_decode_with(options: str) -> None:
    check(build_step([1, 1, 1], [3, 65, 150]), **OPTIONS[options])


@pytest.mark.parametrize("options", [{}, {"window": 520, "sinks": torch.tensor([-1.0, 3.0])}])
@pytest.mark.parametrize("num_programs", [1, 3, 100])
def test_splits_are_merged_by_whoever_comes_last(
    num_programs: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode_attention, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(paged_decode_attention, "num_processors", lambda device: num_programs)
    step = build_step([1, 1, 1], [1100, 7, 513], num_heads=2, num_kv_heads=1, head_dim=8)
    check(step, **options)
    # With the counters as the first launch left them, and partial sums that are not its own.
    step.q.neg_()
    check(step, **options)


def test_a_context_longer_than_all_splits_has_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode_attention, "MAX_SPLITS", 4)
    check(build_step([1], [2700], num_heads=2, num_kv_heads=1, head_dim=8))


def test_more_splits_than_a_merge_holds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode_attention, "TOKENS_PER_SPLIT", 64)
    monkeypatch.setattr(paged_decode_attention, "MERGE_ELEMENTS", 2 * 16)
    check(build_step([1, 1], [310, 129]), sinks=torch.linspace(-2, 4, 6))


def test_a_sequence_is_the_same_bit_for_bit_whatever_shares_its_batch() -> None:
    step = build_step([1, 1, 1], [1100, 7, 513], num_heads=2, num_kv_heads=1, head_dim=8)
    together = check(step)
    for i, length in enumerate([1100, 7, 513]):
        alone = build_step([1], [length], num_heads=2, num_kv_heads=1, head_dim=8)
        metadata = alone.metadata
        metadata.block_tables[0] = step.metadata.block_tables[i, : metadata.block_tables.shape[1]]
        out = paged_attention(step.q[i : i + 1], step.kv_cache, 0, metadata, scale=8**-0.5)
        assert torch.equal(out, together[i : i + 1])


def test_rows_that_pad_a_graph_are_left_alone() -> None:
    step = build_step([1, 1, 1], [70, 3, 66])
    expected = paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=0.25)
    step.metadata.context_lens[1] = 0
    step.metadata.block_tables[1] = -1
    actual = paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=0.25)
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_whole_prompts(dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65]
    check(build_step(lengths, lengths, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_on_a_cached_prefix_beside_decodes(dtype: torch.dtype) -> None:
    check(build_step([2, 17, 64, 1, 1], [66, 81, 129, 64, 600], dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_of_any_shape(shape: str) -> None:
    check(build_step([9, 1, 50], [70, 30, 50], dtype=torch.float16, **SHAPES[shape]))


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_with(options: str) -> None:
    check(build_step([1, 70, 9], [150, 70, 200]), **OPTIONS[options])


def test_a_window_that_is_whole_in_the_middle_of_a_context() -> None:
    check(build_step([66, 1], [330, 300], dtype=torch.float16), window=200)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bit_floats(capability: tuple[int, int], dtype: torch.dtype) -> None:
    step = build_step([1, 1, 9], [70, 600, 73], head_dim=32, dtype=dtype, kv_dtype=FLOAT8)
    check(step)
    check(
        build_step([1, 1, 1], [70, 5, 520], head_dim=24, value_dim=16, dtype=dtype, kv_dtype=FLOAT8)
    )


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_tiles_come_by_pointers_and_by_boxes(capability: tuple[int, int]) -> None:
    check(build_step([80, 1], [210, 70], head_dim=32, dtype=torch.float16))


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_any_tile_of_a_tuning_table_is_right(rows: int) -> None:
    step = build_step([20, 1, 5], [70, 90, 5])
    arguments = (step.q, step.kv_cache, 0, step.metadata)
    scale = step.q.shape[-1] ** -0.5
    options = {"window": None, "softcap": None, "sinks": None}
    tile = Tile(rows, num_warps=4, num_stages=3)
    actual = mixed_with_triton(*arguments, scale=scale, tile=tile, **options)
    assert_near(actual, reference.paged_attention(*arguments, scale=scale), step.q.dtype)


def test_q_may_be_a_view_of_the_projection() -> None:
    for query_lens, lengths in (([1, 1], [70, 5]), ([9, 1], [70, 5])):
        step = build_step(query_lens, lengths)
        tokens, heads, head_dim = step.q.shape
        check(step, q=torch.randn(tokens, heads + 2, head_dim)[:, :heads])


def test_a_step_without_sequences_is_empty() -> None:
    step = build_step([], [])
    out = paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=1.0)
    assert out.shape == (0, 6, 16)


class FarPages:
    """Pages whose first lies far below a small tensor: only page number FAR is really there."""

    FAR = 2**31 // (2 * 64 * 16) + 3

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages, self.dtype = pages, pages.dtype

    def data_ptr(self) -> int:
        return self._pages.data_ptr() - self.FAR * 2 * 64 * 16 * self._pages.itemsize

    def untyped_storage(self) -> Any:
        return self._pages.untyped_storage()

    def new_empty(self, *size: int, device: str) -> "FarPages":
        return self

    def set_(self, *arguments: Any) -> None:
        """The interpreter would copy the tensor to the CPU, where this one is."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return tuple(self._pages.shape)

    def stride(self) -> tuple[int, ...]:
        return self._pages.stride()

    def element_size(self) -> int:
        return self._pages.element_size()

    @property
    def shape(self) -> torch.Size:
        return self._pages.shape


@pytest.mark.parametrize("capability", [(8, 0)])
@pytest.mark.parametrize("query_len", [1, 5])
def test_elements_beyond_2_to_the_31_are_found(query_len: int) -> None:
    step = build_step([query_len], [40], spare_blocks=0)
    expected = paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=0.25)
    cache = step.kv_cache
    cache.keys = (FarPages(cache.keys[0]),)  # type: ignore[assignment] - pretends to be a tensor
    cache.values = (FarPages(cache.values[0]),)  # type: ignore[assignment] - as above
    step.metadata.block_tables.fill_(FarPages.FAR)
    actual = paged_attention(step.q, cache, 0, step.metadata, scale=0.25)
    assert torch.equal(actual, expected)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 63, 64, 65]), st.integers(0, 140)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([None, None, 1, 50, 64]),
    st.sampled_from([None, 0.7]),
)
def test_any_batch(
    sequences: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    query_lens = [n for n, _ in sequences]
    context_lens = [n + cached for n, cached in sequences]
    step = build_step(query_lens, context_lens, num_heads=2, num_kv_heads=1, head_dim=8)
    check(step, window=window, softcap=softcap)
