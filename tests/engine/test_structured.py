"""Grammars in the engine: what they force, how they fail, and that hostile ones hurt nobody."""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import xgrammar

from engine.engine import Engine
from engine.messages import Cancel, GenerateRequest, Sampling, Structure, TokenFrame
from engine.model_runner import ModelRunner
from engine.models.model import ModelSpec
from engine.settings import EngineSettings
from engine.structures.compiler import GrammarCompiler
from engine.structures.grammar import Grammar
from engine.structures.process import NO_COMPILER
from engine.tokenization import Tokenizer
from engine.worker.engine_thread import EngineThread
from engine.worker.mailbox import Bells, Mailbox
from engine.worker.served_model import ServedModel
from engine.worker.structure_desk import FairLine, StructureDesk
from engine.worker.turnstile import Turnstile
from kernels.attention_metadata import AttentionMetadata
from tests.engine.driver import request
from tests.engine.fake_model import FakePages

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
OBJECT = Structure("json_schema", json.dumps(SCHEMA))


def deep_schema(levels: int) -> str:
    begin, end = '{"type": "object", "properties": {"a": ', '}, "required": ["a"]}'
    return begin * levels + '{"type": "string"}' + end * levels


@pytest.fixture(scope="module")
def compiler(default_model_directory: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(default_model_directory, timeout_s=1.0)
    yield compiler
    compiler.stop()


@pytest.fixture(scope="module")
def tokenizer(default_model_directory: Path) -> Tokenizer:
    return Tokenizer.load(default_model_directory)


class RandomModel:
    """Logits by chance: whatever is well-formed is so by its grammar."""

    def __init__(self, vocab_size: int) -> None:
        self.spec = ModelSpec(vocab_size, 4096, 1, "random")
        self.device = torch.device("cpu")
        self._generator = torch.Generator().manual_seed(7)

    def create_kv_cache(self, num_blocks: int) -> FakePages:
        return FakePages(num_blocks)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: FakePages,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        return torch.randn(len(rows), self.spec.vocab_size, generator=self._generator) * 3


def create_engine(tokenizer: Tokenizer) -> Engine:
    runner = ModelRunner(RandomModel(tokenizer.vocab_size), 64)  # type: ignore[arg-type]  # pages of its own
    return Engine(runner, EngineSettings(), 64)


def asked(request_id: str, structure: Structure | None, num_tokens: int = 200, **more: object):
    sampling = Sampling(temperature=1.0, seed=hash(request_id) % 2**31, stop_token_ids=(EOS,))
    made = request(request_id, [5, 6, 7], num_tokens, sampling=sampling, **more)  # type: ignore[arg-type]  # any field
    return msgspec.structs.replace(made, structure=structure)


def run(engine: Engine) -> dict[tuple[str, int], list[TokenFrame]]:
    frames: dict[tuple[str, int], list[TokenFrame]] = {}
    for _ in range(2_000):
        if not engine.has_work:
            break
        for of_node in engine.step().frames.values():
            for frame in of_node:
                frames.setdefault((frame.request_id, frame.choice), []).append(frame)
    return frames


def text_of(tokenizer: Tokenizer, frames: list[TokenFrame]) -> str:
    ids = [token_id for frame in frames for token_id in frame.token_ids]
    return b"".join(tokenizer.token_text(token_id) for token_id in ids if token_id != EOS).decode()


def test_a_random_model_writes_what_the_grammar_says(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    engine = create_engine(tokenizer)
    regex = Structure("regex", "[A-Z]{2}-[0-9]{3}")
    ebnf = Structure("ebnf", 'root ::= "yes" | "no"')
    for name, structure in {"object": OBJECT, "regex": regex, "ebnf": ebnf}.items():
        engine.add(asked(name, structure), compiler.compile(structure))
    engine.add(asked("free", None, num_tokens=5))
    frames = run(engine)
    assert engine.problems() == []
    assert all(frames[name, 0][0].is_accepted for name in ("object", "regex", "ebnf"))
    assert not frames["free", 0][0].is_accepted
    assert {frames[name, 0][-1].finish_reason for name in ("regex", "ebnf")} == {"stop"}
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", text_of(tokenizer, frames["regex", 0]))
    assert text_of(tokenizer, frames["ebnf", 0]) in ("yes", "no")
    if frames["object", 0][-1].finish_reason == "stop":
        found = json.loads(text_of(tokenizer, frames["object", 0]))
        assert set(found) == {"name", "age"}
        assert isinstance(found["age"], int)


def test_each_choice_has_a_state_of_its_own(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    engine = create_engine(tokenizer)
    structure = Structure("regex", "[a-z]{4}[0-9]{4}")
    engine.add(asked("many", structure, num_choices=3), compiler.compile(structure))
    frames = run(engine)
    texts = [text_of(tokenizer, frames["many", choice]) for choice in range(3)]
    assert all(re.fullmatch("[a-z]{4}[0-9]{4}", text) for text in texts)
    assert len(set(texts)) == 3


def test_a_failover_goes_on_in_the_middle_of_the_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, default_model_directory: Path
) -> None:
    structure = Structure("ebnf", 'root ::= "hello world"')
    grammar = compiler.compile(structure)
    first = create_engine(tokenizer)
    first.add(asked("a", structure), grammar)
    whole = [t for frame in run(first)["a", 0] for t in frame.token_ids]
    second = create_engine(tokenizer)
    second.add(asked("a", structure, emitted=tuple(whole[:2]), attempt=2), grammar)
    rest = [t for frame in run(second)["a", 0] for t in frame.token_ids]
    text = b"".join(tokenizer.token_text(t) for t in [*whole[:2], *rest] if t != EOS)
    assert text == b"hello world"


def test_a_form_may_begin_behind_a_marker(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structure = Structure("ebnf", 'root ::= "yes"', begins_after=11)
    state = compiler.compile(structure).start([])
    row = torch.zeros(tokenizer.vocab_size)
    state.mask(row)
    assert torch.isfinite(row).all(), "before the marker anything goes"
    state.accept(5)
    state.accept(11)
    state.mask(row)
    assert 0 < int(torch.isfinite(row).sum()) < 10


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json_schema", '{"type": "hiccup"}'),
        Structure("json_schema", '{"$ref": "#/nowhere"}'),
        Structure("json_schema", "{"),
        Structure("regex", "[.*"),
        Structure("ebnf", "root ::= undefined"),
    ],
)
def test_what_is_malformed_is_refused_with_a_reason(
    compiler: GrammarCompiler, structure: Structure
) -> None:
    grammar = compiler.compile(structure)
    assert grammar.compiled is None
    assert grammar.refusal.startswith("The required form is not valid: ")
    assert "/" not in grammar.refusal.split(":")[0], "no path of the compiler's own build"


@pytest.mark.parametrize(
    "structure",
    [Structure("json_schema", deep_schema(400)), Structure("json_schema", deep_schema(5_000))],
)
def test_what_is_hostile_is_refused_in_about_a_second(
    compiler: GrammarCompiler, structure: Structure
) -> None:
    compiler.compile(OBJECT)  # the process is there
    began = time.monotonic()
    grammar = compiler.compile(structure)
    assert time.monotonic() - began < 5, "one second, and what a loaded machine adds"
    assert grammar.compiled is None
    began = time.monotonic()
    compiler.compile(structure)
    assert time.monotonic() - began < 0.01, "a refusal is remembered"
    assert compiler.compile(Structure("regex", "still (here|there)")).compiled is not None


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(Structure("json_schema", '{"type": "object"}')).start([])
    newline = tokenizer.token_id("Ċ")
    assert newline is not None
    num_newlines = 0
    for token_id in [tokenizer.token_id("{"), *[newline] * 20]:
        row = torch.zeros(tokenizer.vocab_size)
        state.mask(row)
        assert token_id is not None
        if not torch.isfinite(row[token_id]):
            break
        num_newlines += token_id == newline
        state.accept(token_id)
    assert 1 <= num_newlines <= 8


@pytest.mark.slow
def test_an_ambiguous_form_is_given_up_before_it_holds_up_the_others(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    engine = create_engine(tokenizer)
    structure = Structure("regex", "((a|a)*)*b")
    new = asked("ambiguous", structure, num_tokens=3_000)
    # It would end with a `b`, at some time; so that it does not, no `b` is ever likely.
    texts = [(token_id, tokenizer.token_text(token_id)) for token_id in range(tokenizer.vocab_size)]
    letters = [token_id for token_id, text in texts if b"b" in text and set(text) <= set(b"ab")]
    bias = dict.fromkeys(letters, -100.0)
    sampling = msgspec.structs.replace(new.sampling, logit_bias=bias, temperature=0.2)
    engine.add(msgspec.structs.replace(new, sampling=sampling), compiler.compile(structure))
    engine.add(asked("plain", None, num_tokens=2))
    frames = run(engine)
    last = frames["ambiguous", 0][-1]
    assert last.is_refused
    assert len(frames["ambiguous", 0]) < 1_500
    assert len(frames["plain", 0]) == 2
    assert engine.problems() == []


def test_next_goes_who_has_used_the_compiler_least() -> None:
    line = FairLine()
    for name in ("m1", "m2", "m3"):
        line.put(asked(name, OBJECT, tenant="mallory"))
    first = line.get()
    assert first is not None
    line.put(asked("a1", OBJECT, tenant="ada"))
    line.charge("mallory", 1.0)
    line.put(asked("b1", OBJECT, tenant="bob"))
    order = []
    for _ in range(4):
        request = line.get()
        assert request is not None
        order.append(request.request_id)
        line.charge(request.tenant, 0.1)
    assert order == ["a1", "b1", "m2", "m3"]
    line.close()
    assert line.get() is None


class Bench:
    """A real engine thread and a real desk, without a queue."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.engine = create_engine(tokenizer)
        self.bells = Bells()
        self.mailbox = Mailbox(self.engine.stats, self.bells)
        self.desk = StructureDesk(directory, self.mailbox, EngineSettings())
        self.engine_thread = EngineThread(self.bells, Turnstile(), quantum_s=1.0)
        self.engine_thread.add(ServedModel("model", self.engine, self.mailbox, self.desk))
        self._threads = [
            threading.Thread(target=run, daemon=True)
            for run in (self.engine_thread.run, self.desk.run)
        ]
        for thread in self._threads:
            thread.start()

    def frames(self, request_id: str, timeout_s: float = 60.0) -> list[TokenFrame]:
        """All frames of a request, up to its last one."""
        found: list[TokenFrame] = []
        deadline = time.monotonic() + timeout_s
        while not (found and found[-1].finish_reason):
            assert time.monotonic() < deadline
            self.bells.told.wait(0.2)
            self.bells.told.clear()
            for output in self.mailbox.take_news().outputs:
                for of_node in output.frames.values():
                    found += [frame for frame in of_node if frame.request_id == request_id]
        return found

    def close(self) -> None:
        self.engine_thread.stop()
        self.desk.close()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()


@pytest.fixture
def bench(default_model_directory: Path, tokenizer: Tokenizer) -> Iterator[Bench]:
    bench = Bench(default_model_directory, tokenizer)
    yield bench
    bench.close()


@pytest.mark.slow
def test_a_tokenizer_that_no_grammar_is_made_for_costs_the_forms_and_not_the_worker(
    default_model_directory: Path, tmp_path: Path
) -> None:
    for path in default_model_directory.glob("*token*.json"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 10**30}))
    compiler = GrammarCompiler(tmp_path, timeout_s=1.0)
    grammar = compiler.compile(OBJECT)
    compiler.stop()
    assert grammar.compiled is None
    assert grammar.refusal == NO_COMPILER


def test_the_compilers_process_does_without_torch(
    compiler: GrammarCompiler, default_model_directory: Path
) -> None:
    """Beside its own imports a compiler next door has a vocabulary: 100 MB, with torch 300."""
    assert compiler.compile(OBJECT).compiled is not None
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    found = [pid for pid in children if b"structures.process" in _command_line(pid)]
    (pid,) = found
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def _command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_while_a_form_compiles_others_are_served(bench: Bench, tokenizer: Tokenizer) -> None:
    bench.mailbox.order(requests=[asked("hostile", Structure("json_schema", deep_schema(400)))])
    bench.mailbox.order(requests=[asked("plain", None, num_tokens=3)])
    assert len(bench.frames("plain")) == 3
    (refused,) = bench.frames("hostile")
    assert refused.is_refused
    assert refused.error
    bench.mailbox.order(requests=[asked("good", Structure("ebnf", 'root ::= "yes"'))])
    assert text_of(tokenizer, bench.frames("good")) == "yes"


def test_a_request_that_is_cancelled_while_its_form_compiles_ends(bench: Bench) -> None:
    structured: GenerateRequest = asked("gone", Structure("json_schema", deep_schema(300)))
    bench.mailbox.order(requests=[structured])
    bench.mailbox.order(cancels=[Cancel("gone")])
    (last,) = bench.frames("gone")
    assert last.finish_reason == "error"
    assert not last.is_refused


@pytest.mark.parametrize("vocab_size", [33, 64, 102])
def test_a_mask_never_writes_into_the_next_row(vocab_size: int) -> None:
    info = xgrammar.TokenizerInfo(
        [b"a%d" % token_id for token_id in range(vocab_size)],
        vocab_size=vocab_size,
        stop_token_ids=[0],
    )
    free = json.dumps({"type": "structural_tag", "format": {"type": "any_tokens"}})
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(free)
    state = Grammar(Structure("structural_tag", free), compiled).start([])
    logits = torch.zeros(2, vocab_size)
    state.mask(logits[0])
    assert torch.isfinite(logits).all()
