"""A sample of `make test-models`: every kind of attention and of memory once."""

import pytest

from tests.models.family import Verdict, judge
from tests.models.run import summary, table

SAMPLE = {
    "gpt2": "attention hook",  # learned positions, biases
    "gemma2": "attention hook",  # softcap, windows in every other layer
    "gpt_oss": "attention hook",  # sinks, windows, experts
    "deepseek_v3": "attention hook",  # latent attention: keys wider than values
    "llama4_text": "own cache, in chunks",  # chunked attention
    "bloom": "own cache, in chunks",  # biases by distance
    "qwen3_next": "own cache, in chunks",  # linear attention beside full attention
    "mamba": "own cache, with whole prompts",  # recurrent, and continues one token at a time
    "recurrent_gemma": "own cache, without a cache",  # keeps its state in the modules
}


@pytest.mark.slow
@pytest.mark.usefixtures("eager_admission", "one_thread")
@pytest.mark.filterwarnings("ignore")  # transformers warns of much
@pytest.mark.parametrize("family", SAMPLE)
def test_families_generate_what_transformers_does(family: str) -> None:
    verdict = judge(family)
    assert (verdict.state, verdict.tier) == ("identical", SAMPLE[family]), verdict.reason


@pytest.mark.slow
@pytest.mark.usefixtures("eager_admission", "one_thread")
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_looks_ahead_in_its_prompt_runs_and_is_called_unsteady() -> None:
    verdict = judge("cpmant")
    assert verdict.state == "unsteady"
    assert "after a preemption it goes on in another way" in verdict.reason


def test_the_last_line_counts_every_family_once() -> None:
    verdicts = [
        Verdict("a", "identical", "fused"),
        Verdict("b", "identical", "own cache, in chunks", "0 of its 2 layers ask for attention"),
        Verdict("c", "refused", reason="no tier"),
        Verdict("d", "impossible", reason="too big"),
    ]
    assert summary(verdicts) == "families=4 identical=2 slow=1 impossible=2"
    assert table(verdicts, "1").count("\n| ") == 5
