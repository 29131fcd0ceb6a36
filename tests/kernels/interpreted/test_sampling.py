"""The claims about sampling hold for the kernel too, and it draws what plain torch draws."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling, sampling_kernel
from kernels.sampling import log_probs, sample
from kernels.sampling_batch import SamplingBatch
from kernels.sampling_kernel import sample_with_triton
from tests.kernels.test_sampling import (  # noqa: F401 - collected here, where the kernel runs
    ROWS,
    batch_of,
    test_a_broken_row_gets_no_token_and_harms_no_other,
    test_a_tiny_temperature_is_greedy,
    test_equals_of_the_last_kept_token_are_kept,
    test_greedy_rows_take_the_first_largest_logit,
    test_log_probs_sum_to_one_and_name_the_best,
)


def with_torch(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "runs_triton", lambda x: False)
        return sample(logits, batch)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(ROWS, min_size=1, max_size=6),
    st.sampled_from([1, 5, 100, 300]),
    st.sampled_from([0.0, 0.1, 3.0]),
)
def test_it_draws_what_torch_draws(
    rows: list[dict[str, Any]], vocabulary: int, spread: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernel, "MAX_BLOCK", 64)  # several blocks, in a short time
        logits = torch.randn(len(rows), vocabulary) * spread
        batch = batch_of(rows)
        assert torch.equal(sample_with_triton(logits, batch), with_torch(logits, batch))


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"top_k": 2}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.2}),
        *({"top_k": 90, "top_p": 0.7}, {"top_k": 3, "top_p": 0.6}),
    ],
)
def test_many_draws_from_one_row_equal_those_of_torch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_kernel, "MAX_BLOCK", 64)
    logits = (torch.randn(1, 150) * 2).expand(25, -1)
    batch = batch_of([{**options, "seeds": 5, "positions": i} for i in range(25)])
    drawn = sample(logits, batch)
    assert torch.equal(drawn, with_torch(logits, batch))
    assert len(set(drawn.tolist())) > 1


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, 300)
    rows = [{"top_p": 0.9, "positions": i} for i in range(6)]
    together = sample(logits, batch_of(rows)).tolist()
    assert [int(sample(logits[i : i + 1], batch_of([rows[i]]))) for i in range(6)] == together


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((40, 300), float("-inf"))
    logits[:39, [3, 299]] = 0.0
    rows: list[dict[str, Any]] = [
        {"positions": i, "top_p": 0.999 if i % 2 else 1.0, "top_k": 200 * (i % 3 == 0)}
        for i in range(40)
    ]
    tokens = sample(logits, batch_of(rows)).tolist()
    assert set(tokens[:39]) == {3, 299}
    assert tokens[39] == sampling.NO_TOKEN


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 10), batch_of([])).shape == (0,)


def test_top_log_probs_are_in_order_and_equals_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernel, "MAX_BLOCK", 16)
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, float("-inf"), 1.0]).repeat(2, 8)
    found = log_probs(logits, torch.tensor([1, 4]), 18)
    every = [i for i in range(48) if i % 6 in (1, 3)]
    assert found.top_token_ids[0].tolist() == [*every, 2, 5]
    expected = torch.log_softmax(logits.double(), -1)
    assert float(found.token[1]) == float("-inf")
    torch.testing.assert_close(found.token[0].double(), expected[0, 1], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(
        found.top.double(), expected.gather(1, found.top_token_ids), atol=2e-6, rtol=1e-6
    )
