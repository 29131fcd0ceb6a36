"""A model that says anything at all: behind the marker of a call, the schema of the tool binds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch

from api.conversation import Conversation, Tool, ToolUse
from api.outputs.deltas import CallDelta
from api.outputs.reading import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    Reading,
    Syntax,
)
from engine.structures.compiler import GrammarCompiler
from engine.structures.grammar import Grammar, StructureState
from engine.tokenization import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("weather", parameters=SCHEMA, is_strict=True),
    Tool("anything", parameters=SCHEMA),
)
SYNTAXES = [HERMES, MISTRAL, MISTRAL_NAMED, DEEPSEEK, DEEPSEEK_FENCED, LLAMA]


@pytest.fixture(scope="module", params=[False, True], ids=["spelled", "tokens"])
def directory(
    request: pytest.FixtureRequest,
    default_model_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The default model; its tokenizer with every marker as a control token, or with none."""
    made = tmp_path_factory.mktemp("marked")
    for path in default_model_directory.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in (
            "tokenizer.json",
            "config.json",
        ):
            (made / path.name).symlink_to(path)
    fast = tokenizers.Tokenizer.from_file(str(default_model_directory / "tokenizer.json"))
    if request.param:
        fast.add_special_tokens([marker for syntax in SYNTAXES for marker in syntax.markers])
    fast.save(str(made / "tokenizer.json"))
    config = json.loads((default_model_directory / "config.json").read_text())
    config["vocab_size"] = fast.get_vocab_size()
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def compiler(directory: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(directory, timeout_s=5.0)
    yield compiler
    compiler.stop()


def promised(
    compiler: GrammarCompiler, tokenizer: Tokenizer, syntax: Syntax, *, is_parallel: bool = True
) -> tuple[Grammar, Reading]:
    use = ToolUse(TOOLS, is_parallel=is_parallel)
    reading = Reading(
        names=frozenset(tool.name for tool in TOOLS), syntax=syntax, is_parallel=is_parallel
    )
    structure = Conversation([], use).structure_for(reading, tokenizer)
    assert structure is not None
    grammar = compiler.compile(structure)
    assert grammar.compiled is not None, grammar.refusal
    return grammar, reading


def write(state: StructureState, tokenizer: Tokenizer, wanted: str, num_tokens: int) -> list[int]:
    """What is written by a model that wants to say `wanted`, then anything: cheap tokens first."""
    generator = torch.Generator().manual_seed(3)
    said: list[int] = []
    for token_id in [*tokenizer._fast.encode(wanted, add_special_tokens=False).ids]:
        assert is_allowed(state, tokenizer, token_id), (wanted, said)
        state.accept(token_id)
        said.append(token_id)
    for _ in range(num_tokens):
        row = torch.rand(tokenizer.vocab_size, generator=generator)
        state.mask(row)
        token_id = int(row.argmax())
        if token_id in tokenizer.eos_token_ids:
            break
        state.accept(token_id)
        said.append(token_id)
    return said


def is_allowed(state: StructureState, tokenizer: Tokenizer, token_id: int) -> bool:
    row = torch.zeros(tokenizer.vocab_size)
    state.mask(row)
    return bool(row[token_id] == 0)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.form.trigger)
def test_behind_the_marker_only_a_call_of_the_schema_can_follow(
    compiler: GrammarCompiler, directory: Path, syntax: Syntax
) -> None:
    tokenizer = Tokenizer.load(directory)
    grammar, reading = promised(compiler, tokenizer, syntax)
    assert syntax.form is not None
    said = write(grammar.start([]), tokenizer, "Let me see. " + syntax.form.trigger, 400)
    text = b"".join(map(tokenizer.token_text, said)).decode(errors="replace")
    # Llama's syntax has no marker: its reader wants the call to be the whole answer.
    parser = reading.parser()
    deltas = [*parser.push(text.removeprefix("Let me see. ")), *parser.end()]
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    assert calls, text
    first = "".join(call.arguments for call in calls if call.index == calls[0].index)
    name = next(call.name for call in calls if call.name)
    assert name in ("weather", "anything")
    if name == "weather":
        arguments = json.loads(first)
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Oslo", "Rome")
        assert isinstance(arguments["days"], int)


def test_without_a_strict_tool_nothing_binds(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    conversation = Conversation([], ToolUse(TOOLS[1:]))
    assert conversation.structure_for(conversation.reading(tokenizer, []), tokenizer) is None


def test_free_text_stays_free(compiler: GrammarCompiler, directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    grammar, _ = promised(compiler, tokenizer, HERMES)
    state = grammar.start([])
    assert is_allowed(state, tokenizer, tokenizer.eos_token_ids[0])
    write(state, tokenizer, 'Any <text> {"a": 1} at all. Grüße, 你好 🎉!', 0)
    assert is_allowed(state, tokenizer, tokenizer.eos_token_ids[0])


def test_forty_strict_tools_are_compiled_in_time(
    directory: Path, compiler: GrammarCompiler
) -> None:
    tokenizer = Tokenizer.load(directory)
    fields = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": SCHEMA}
    parameters = SCHEMA | {"properties": fields, "required": list(fields)}
    tools = tuple(Tool(f"tool_{number}", "", parameters, True) for number in range(40))
    conversation = Conversation([], ToolUse(tools))
    reading = Reading(names=frozenset(tool.name for tool in tools), syntax=HERMES)
    structure = conversation.structure_for(reading, tokenizer)
    assert structure is not None
    grammar = compiler.compile(structure)
    assert grammar.compiled is not None, grammar.refusal
    assert grammar.compiled.memory_size_bytes < 16 * 1024**2
