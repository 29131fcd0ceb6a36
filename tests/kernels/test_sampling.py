"""Sampling: the right distribution, the same token whatever shares the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.sampling import (
    NO_TOKEN,
    NUM_CANDIDATES,
    log_probs,
    sample,
    uniform_from_seed,
)
from kernels.sampling_batch import SamplingBatch


def batch_of(rows: list[dict[str, Any]]) -> SamplingBatch:
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seeds": 0,
        "positions": 0,
    }
    full = [{**defaults, **row} for row in rows]
    return SamplingBatch.build(**{name: [row[name] for row in full] for name in defaults})


def test_greedy_rows_take_the_first_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -1.0, 5.0]])
    assert sample(logits, batch_of([{"temperature": 0.0}] * 2)).tolist() == [1, 0]
    mixed = batch_of([{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}])
    assert sample(logits, mixed).tolist() == [1, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
        {"top_p": 1e-9},
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    num_draws, at_once = 2_000, 250
    row = torch.randn(40) * 2
    rows = [{**options, "seeds": 7, "positions": i} for i in range(num_draws)]
    drawn = [
        sample(row.expand(at_once, -1), batch_of(rows[first : first + at_once]))
        for first in range(0, num_draws, at_once)
    ]
    tokens = torch.cat(drawn)
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    expected = reference.kept_probabilities(row, **filters)
    counts = torch.bincount(tokens, minlength=40).double()
    assert not counts[expected == 0].any()
    # Each count is binomial: five standard deviations are one in two million.
    spread = (num_draws * expected * (1 - expected)).sqrt()
    assert ((counts - num_draws * expected).abs() <= 5 * spread + 1).all()


@pytest.mark.parametrize("vocabulary", [10, NUM_CANDIDATES, 3000])
def test_a_large_kept_set_is_drawn_exactly(vocabulary: int) -> None:
    row = torch.randn(vocabulary) * 0.1  # nearly flat: top_p keeps most of the vocabulary
    for options in ({"top_p": 0.9}, {"top_k": vocabulary - 3}, {"top_k": 2 * vocabulary}):
        filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
        expected = reference.kept_probabilities(row, **filters)
        rows = [{**options, "positions": i} for i in range(300)]
        tokens = sample(row.expand(300, -1), batch_of(rows))
        running = expected.cumsum(0)
        uniform = uniform_from_seed(torch.zeros(300, dtype=torch.int64), torch.arange(300)).double()
        below = torch.where(tokens > 0, running[(tokens - 1).clamp(min=0)], 0.0)
        assert (below <= uniform + 1e-5).all()
        assert (uniform <= running[tokens] + 1e-5).all()


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6]),
        "top_k": st.sampled_from([0, 0, 1, 2, 50, 400, 10_000]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        "seeds": st.integers(-(2**70), 2**70),
        "positions": st.integers(0, 10**6),
    }
)


@settings(max_examples=40)
@given(st.lists(ROWS, min_size=1, max_size=12), st.sampled_from([5, 256, 1000]))
def test_a_token_does_not_depend_on_its_batch(rows: list[dict[str, Any]], vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), vocabulary, generator=generator) * 3
    together = sample(logits, batch_of(rows))
    alone = [int(sample(logits[i : i + 1], batch_of([row]))) for i, row in enumerate(rows)]
    assert together.tolist() == alone
    reverse = sample(logits.flip(0), batch_of(rows[::-1])).flip(0)
    assert reverse.tolist() == alone


def test_equals_of_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, 1.0, 1.0, -1.0]]).expand(32, -1)
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.36}):
        rows = [{**options, "positions": i} for i in range(32)]
        assert set(sample(logits, batch_of(rows)).tolist()) == {0, 2, 3, 4}


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.1}, {"top_k": 3, "top_p": 0.5}])
def test_equals_beyond_the_candidates_are_kept_too(options: dict[str, Any]) -> None:
    logits = torch.zeros(3000, 2 * NUM_CANDIDATES)
    rows = [{**options, "positions": i} for i in range(3000)]
    drawn = sample(logits, batch_of(rows))
    assert len(set(drawn.tolist())) > 2 * NUM_CANDIDATES - 20


def test_other_seed_or_position_gives_other_tokens() -> None:
    logits = torch.zeros(200, 1000)
    by_seed = sample(logits, batch_of([{"seeds": i} for i in range(200)]))
    by_position = sample(logits, batch_of([{"positions": i} for i in range(200)]))
    assert len(set(by_seed.tolist())) > 150
    assert len(set(by_position.tolist())) > 150
    assert by_seed[1:].tolist() != by_position[1:].tolist()


def test_uniform_is_flat_and_never_one() -> None:
    positions = torch.arange(100_000)
    for seed in (0, 1, -1, 2**63 - 1):
        uniform = uniform_from_seed(torch.full_like(positions, seed), positions)
        assert float(uniform.min()) >= 0
        assert float(uniform.max()) < 1
        counts = torch.histc(uniform, bins=20, min=0, max=1)
        assert float(((counts - 5000) ** 2 / 5000).sum()) < 50  # chi squared, 19 degrees


def test_hash_is_splitmix64() -> None:
    # Against arithmetic on Python's own integers, so that every backend can be held to it.
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (12345, 678), (2**63 + 5, 1), (2**64 - 1, 10**6)):
        state = (mix((seed + golden) % 2**64) + position * golden) % 2**64
        expected = (mix(state) >> 40) / 2**24
        signed = seed - 2**64 if seed >= 2**63 else seed
        assert (
            float(uniform_from_seed(torch.tensor([signed]), torch.tensor([position]))) == expected
        )


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_gets_no_token_and_harms_no_other(broken: float) -> None:
    logits = torch.randn(6, 300)
    whole = sample(logits, batch_of([{}, {"top_p": 0.5}, {"temperature": 0.0}] * 2))
    logits[:3, 17] = broken
    tokens = sample(logits, batch_of([{}, {"top_p": 0.5}, {"temperature": 0.0}] * 2))
    assert tokens.tolist() == [NO_TOKEN] * 3 + whole[3:].tolist()


def test_masked_tokens_are_never_drawn_and_a_fully_masked_row_gets_none() -> None:
    logits = torch.full((400, 500), float("-inf"))
    logits[:399, [3, 499]] = 0.0
    rows: list[dict[str, Any]] = [
        {"positions": i, "top_p": 0.999 if i % 2 else 1.0, "top_k": 300 * (i % 3 == 0)}
        for i in range(400)
    ]
    tokens = sample(logits, batch_of(rows)).tolist()
    assert set(tokens[:399]) == {3, 499}
    assert tokens[399] == NO_TOKEN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_may_be_half_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 100).to(dtype)
    rows: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}]
    assert (
        sample(logits, batch_of(rows)).tolist() == sample(logits.float(), batch_of(rows)).tolist()
    )


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(5, 100) * 10
    rows: list[dict[str, Any]] = [{"temperature": 1e-6, "positions": i} for i in range(5)]
    assert torch.equal(sample(logits, batch_of(rows)), logits.argmax(-1))


def test_log_probs_sum_to_one_and_name_the_best() -> None:
    logits = torch.randn(3, 50).half()
    result = log_probs(logits, torch.tensor([0, 49, 7]), 50)
    expected = torch.log_softmax(logits.double(), -1)
    near = {"atol": 2e-6, "rtol": 1e-6}
    torch.testing.assert_close(result.token.double(), expected[[0, 1, 2], [0, 49, 7]], **near)
    torch.testing.assert_close(result.top.double().exp().sum(-1), torch.ones(3).double(), **near)
    assert torch.equal(result.top_token_ids[:, 0], logits.argmax(-1))
    assert log_probs(logits, torch.tensor([0, 1, 2]), 0).top.shape == (3, 0)
