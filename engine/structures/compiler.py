"""Grammars by structure: asked of the process next door (`engine.structures.process`), and kept."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec
import xgrammar

from engine.errors import ModelRefused
from engine.messages import Structure
from engine.structures.grammar import Grammar
from engine.structures.process import Compiled, tokenizer_info
from engine.tokenization import Tokenizer

CACHE_BYTES_MAX = 256 * 1024**2
CACHE_ENTRIES_MAX = 1_000
ENTRY_BYTES = 1_024
"""What an entry weighs beside its grammar; a refusal weighs only that."""
NO_COMPILER = (
    "No form can be required of this model's answers: it has no tokenizer that one can be made for."
)


class GrammarCompiler:
    """Grammars by structure, the least recently used forgotten. Not for two threads."""

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._info: xgrammar.TokenizerInfo | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cache: OrderedDict[Structure, Grammar] = OrderedDict()
        self._num_bytes = 0

    def start(self) -> None:
        """Have the process load its tokenizer before anybody waits for it.

        Raises ModelRefused for a model without one, or one that grammars cannot be made for.
        """
        if self._info is None:
            try:
                self._info = tokenizer_info(Tokenizer.load(self._directory))
            except ModelRefused:
                raise
            except Exception as fault:  # a foreign tokenizer may fail in any way
                raise ModelRefused(f"no grammars for its tokenizer: {fault}") from fault
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "engine.structures.process"]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(self._directory), str(self._timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )

    def stop(self) -> None:
        """Let the process end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def compile(self, structure: Structure) -> Grammar:
        """The grammar, or its refusal; what was asked before is known at once."""
        known = self._cache.get(structure)
        if known is not None:
            self._cache.move_to_end(structure)
            return known
        try:
            self.start()
        except ModelRefused:
            return Grammar(structure, None, NO_COMPILER)
        grammar = self._grammar(structure, self._ask(structure))
        self._remember(grammar)
        return grammar

    def _grammar(self, structure: Structure, answer: Compiled) -> Grammar:
        if answer.grammar is None:
            return Grammar(structure, None, answer.refused or "")
        assert self._info is not None
        compiled = xgrammar.CompiledGrammar.deserialize_json(answer.grammar, self._info)
        return Grammar(structure, compiled)

    def _ask(self, structure: Structure) -> Compiled:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(structure) + b"\n")
        process.stdin.flush()
        return msgspec.json.decode(process.stdout.readline(), type=Compiled)

    def _remember(self, grammar: Grammar) -> None:
        self._cache[grammar.structure] = grammar
        self._num_bytes += _weight(grammar)
        while self._num_bytes > CACHE_BYTES_MAX or len(self._cache) > CACHE_ENTRIES_MAX:
            _, forgotten = self._cache.popitem(last=False)
            self._num_bytes -= _weight(forgotten)


def _weight(grammar: Grammar) -> int:
    own = 0 if grammar.compiled is None else grammar.compiled.memory_size_bytes
    return own + ENTRY_BYTES + len(grammar.structure.source)
