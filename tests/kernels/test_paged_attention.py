"""Attention over the paged cache against the one-token-at-a-time oracle."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.kv_cache import FLOAT8, PagedKVCache
from kernels.paged_attention import paged_attention
from tests.kernels.batches import Step, assert_near, build_step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(step: Step, **options: Any) -> None:
    scale = step.q.shape[-1] ** -0.5
    arguments = (step.q, step.kv_cache, 0, step.metadata)
    expected = reference.paged_attention(*arguments, scale=scale, **options)
    actual = paged_attention(*arguments, scale=scale, **options)
    assert actual.dtype == step.q.dtype
    assert_near(actual, expected, step.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_at_page_boundaries(dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129]
    check(build_step([1] * len(lengths), lengths, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_whole_prompts(dtype: torch.dtype) -> None:
    lengths = [1, 2, 63, 64, 65, 130]
    check(build_step(lengths, lengths, dtype=dtype))


def test_chunked_prefill_on_a_cached_prefix() -> None:
    check(build_step([2, 17, 64, 1], [66, 81, 129, 64]))


def test_mixed_batch_keeps_every_token_in_its_place() -> None:
    check(build_step([1, 5, 1, 64, 1, 2], [70, 5, 1, 128, 200, 90]))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1), (5, 5)])
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_head_shapes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(
        build_step(
            [1, 3, 1],
            [65, 67, 20],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    )


@pytest.mark.parametrize("window", [1, 7, 64, 65, 100, 1000])
def test_sliding_window(window: int) -> None:
    check(build_step([1, 1, 1, 9, 80], [3, 150, 130, 70, 80]), window=window)


def test_pages_outside_the_window_may_be_gone() -> None:
    step = build_step([1, 1, 4], [200, 140, 300])
    expected = reference.paged_attention(
        step.q, step.kv_cache, 0, step.metadata, scale=0.25, window=20
    )
    for sequence, num_gone in ((0, 2), (1, 1), (2, 4)):
        step.metadata.block_tables[sequence, :num_gone] = -1
    actual = paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=0.25, window=20)
    assert_near(actual, expected, torch.float32)


def test_softcap_with_and_without_window() -> None:
    step = build_step([1, 1, 9, 70], [65, 130, 73, 70])
    step.q.mul_(20)  # large scores, or the cap would do nothing
    check(step, softcap=5.0)
    check(step, softcap=5.0, window=30)


def test_sinks_take_their_share_of_every_softmax() -> None:
    step = build_step([1, 1, 9, 70], [65, 130, 73, 70])
    sinks = torch.linspace(-2, 4, step.q.shape[1])
    for options in ({}, {"window": 30}, {"softcap": 5.0}):
        check(step, sinks=sinks, **options)


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"softcap": 2.0}])
@pytest.mark.parametrize(("kv_dtype", "value_dim"), [(FLOAT8, 16), (FLOAT8, 8), (None, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_caches_and_values_of_another_size(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, value_dim: int, options: dict[str, Any]
) -> None:
    step = build_step([1, 1, 9], [65, 66, 73], dtype=dtype, kv_dtype=kv_dtype, value_dim=value_dim)
    check(step, **options)


def test_attends_to_the_layer_asked_for() -> None:
    step = build_step([1], [10], num_layers=3)
    outs = [paged_attention(step.q, step.kv_cache, i, step.metadata, scale=1.0) for i in range(3)]
    assert not torch.allclose(outs[0], outs[1])
    for layer, out in enumerate(outs):
        expected = reference.paged_attention(step.q, step.kv_cache, layer, step.metadata, scale=1.0)
        assert_near(out, expected, torch.float32)


def test_q_may_be_a_view_of_the_qkv_projection() -> None:
    step = build_step([1, 3], [65, 10])
    projection = torch.randn(4, 6 * 16 + 64)
    q = projection[:, : 6 * 16].view(4, 6, 16)
    expected = reference.paged_attention(q, step.kv_cache, 0, step.metadata, scale=0.25)
    actual = paged_attention(q, step.kv_cache, 0, step.metadata, scale=0.25)
    assert_near(actual, expected, torch.float32)


def test_empty_step_gives_an_empty_result() -> None:
    step = build_step([], [])
    assert paged_attention(step.q, step.kv_cache, 0, step.metadata, scale=1.0).shape == (0, 6, 16)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 63, 64, 65]), st.integers(0, 140)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, None, 1, 50, 64]),
)
def test_any_batch(sequences: list[tuple[int, int]], window: int | None) -> None:
    query_lens = [n for n, _ in sequences]
    context_lens = [n + cached for n, cached in sequences]
    check(
        build_step(query_lens, context_lens, num_heads=2, num_kv_heads=1, head_dim=8),
        window=window,
    )


def test_bytes_per_block_is_what_a_block_takes() -> None:
    cache = PagedKVCache(3, 5, 2, 16, torch.bfloat16, "cpu")
    taken = sum(pages.nbytes for pages in (*cache.keys, *cache.values))
    assert PagedKVCache.bytes_per_block(3, 2, 16, torch.bfloat16) * 5 == taken
    assert PagedKVCache.bytes_per_block(3, 2, 16, FLOAT8, value_dim=8) * 5 == taken * 3 // 8


def test_copied_block_holds_the_same_tokens_in_every_layer() -> None:
    step = build_step([1], [64], num_layers=2)
    source = int(step.metadata.block_tables[0, 0])
    destination = (source + 1) % step.kv_cache.num_blocks
    step.kv_cache.copy_block(source, destination)
    for layer in range(2):
        for index in (source, destination):
            table = torch.tensor([index])
            keys, values = step.kv_cache.gather(layer, table, 64)
            torch.testing.assert_close(keys, step.kv_cache.keys[layer][source])
            torch.testing.assert_close(values, step.kv_cache.values[layer][source])
