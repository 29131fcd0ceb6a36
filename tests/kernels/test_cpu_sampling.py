"""The claims about sampling hold for the C++ version too, and it draws what plain torch draws."""

from typing import Any

import pytest
import torch

from kernels.cpu import library as cpu
from kernels.cpu import sampling as cpu_sampling
from kernels.cpu.library import CpuLibrary
from kernels.sampling import sample
from tests.kernels.test_sampling import (  # noqa: F401 - collected here, with the library enabled
    batch_of,
    test_a_broken_row_gets_no_token_and_harms_no_other,
    test_a_large_kept_set_is_drawn_exactly,
    test_a_tiny_temperature_is_greedy,
    test_a_token_does_not_depend_on_its_batch,
    test_draws_follow_the_filtered_distribution,
    test_equals_beyond_the_candidates_are_kept_too,
    test_equals_of_the_last_kept_token_are_kept,
    test_greedy_rows_take_the_first_largest_logit,
    test_logits_may_be_half_precision,
    test_masked_tokens_are_never_drawn_and_a_fully_masked_row_gets_none,
    test_other_seed_or_position_gives_other_tokens,
)


@pytest.fixture(autouse=True)
def enabled(cpu_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_active", [cpu_library])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
def test_it_draws_what_plain_torch_draws(
    dtype: torch.dtype, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "seeds": 3 * k + 1, "positions": k}
        for t in (0.0, 0.7, 1.5)
        for k in (0, 1, 40, 2000)
        for p in (1.0, 0.9, 0.3)
        for m in (0.0, 0.05)
    ]
    logits = (torch.randn(len(rows), 5001) * spread).to(dtype)
    ours = sample(logits, batch_of(rows))
    monkeypatch.setattr(cpu, "_active", [])
    theirs = sample(logits, batch_of(rows))
    # exp differs in its last bit, so a draw that falls between two tokens may go either way
    assert int((ours != theirs).sum()) <= 1


def test_greedy_reads_nothing_but_the_logits(cpu_library: CpuLibrary) -> None:
    logits = torch.randn(70, 49152)
    batch = batch_of([{"temperature": 0.0}] * 70)
    assert batch.is_all_greedy
    assert torch.equal(cpu_sampling.sample(cpu_library, logits, batch), logits.argmax(-1))


def test_rows_may_have_a_stride(cpu_library: CpuLibrary) -> None:
    wide = torch.randn(9, 400)
    batch = batch_of([{"positions": i} for i in range(9)])
    expected = cpu_sampling.sample(cpu_library, wide[:, 100:350].contiguous(), batch)
    assert torch.equal(cpu_sampling.sample(cpu_library, wide[:, 100:350], batch), expected)
