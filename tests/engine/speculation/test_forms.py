"""Drafts under a grammar: the matcher walks ahead, and comes back as if it had not."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.engine import Engine
from engine.messages import CostModel, Sampling, Structure
from engine.model_runner import ModelRunner
from engine.models.model import ModelSpec
from engine.settings import EngineSettings
from engine.structures.compiler import GrammarCompiler
from engine.tokenization import Tokenizer
from tests.engine.driver import Driver, request
from tests.engine.fake_model import FakeModel

EOS = 2
LIST = Structure("regex", '\\[("(red|green|blue)", ){12,30}"end"\\]')
LATER = Structure("regex", LIST.source, begins_after=11)
SCHEMA = Structure(
    "json_schema",
    '{"type": "array", "minItems": 3, "maxItems": 9, "items": {"type": "object", "properties":'
    ' {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}}',
)
CHEAP_DRAFTS = CostModel(
    base_s=0.02, per_token_s=1e-4, per_prefill_context_s=1e-9, per_decode_context_s=1e-9
)


class DecidedModel(FakeModel):
    """Logits that the last two tokens decide: what it has said in a form, it soon says again."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.spec = ModelSpec(vocab_size, 4096, 1)

    def logits(self, context: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * context[-2] + context[-1])
        row = torch.randn(self.spec.vocab_size, generator=generator) * 3
        row[11] += 11.0
        return row


@pytest.fixture(scope="module")
def compiler(default_model_directory: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(default_model_directory, timeout_s=5.0)
    yield compiler
    compiler.stop()


@pytest.fixture(scope="module")
def vocab_size(default_model_directory: Path) -> int:
    return Tokenizer.load(default_model_directory).vocab_size


@pytest.mark.parametrize("structure", [LIST, LATER, SCHEMA], ids=["list", "later", "schema"])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_drafts_change_nothing_about_what_a_form_allows(
    compiler: GrammarCompiler, vocab_size: int, structure: Structure, temperature: float
) -> None:
    sampling = Sampling(temperature, seed=4, stop_token_ids=(EOS,))
    asked = request("a", [5, 6, 7, 8, 9], 150, sampling=sampling)
    texts = []
    for is_speculation_on in (True, False):
        run = Driver(
            Engine(
                ModelRunner(DecidedModel(vocab_size), 64),
                EngineSettings(is_speculation_on=is_speculation_on),
                64,
                cost_model=CHEAP_DRAFTS,
                now_us=functools.partial(next, itertools.count(step=1_000)),
            )
        )
        structured = msgspec.structs.replace(asked, structure=structure)
        run.engine.add(structured, compiler.compile(structure))
        run.run()
        texts.append((run.received["a", 0].token_ids, run.received["a", 0].finish_reason))
        assert (run.engine.stats.num_accepted_drafts > 5) == is_speculation_on
    assert texts[0] == texts[1]
