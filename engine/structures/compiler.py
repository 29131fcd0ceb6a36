"""Grammars by structure: tried in the process next door (`engine.structures.process`), and kept."""

import importlib
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.messages import Structure
from engine.structures.process import Verdict

if TYPE_CHECKING:  # imported when the first form is asked for: it takes a second
    from engine.structures.grammar import Grammar, GrammarMaker

CACHE_BYTES_MAX = 256 * 1024**2
CACHE_ENTRIES_MAX = 1_000
ENTRY_BYTES = 1_024
"""What an entry weighs beside its grammar; a refusal weighs only that."""


class GrammarCompiler:
    """Grammars by structure, the least recently used forgotten. Not for two threads."""

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._maker: GrammarMaker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cache: OrderedDict[Structure, Grammar] = OrderedDict()
        self._num_bytes = 0

    def start(self) -> None:
        """Have the process load its tokenizer before anybody waits for it."""
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

    def compile(self, structure: Structure) -> "Grammar":
        """The grammar, or its refusal; what was asked before is known at once."""
        known = self._cache.get(structure)
        if known is not None:
            self._cache.move_to_end(structure)
            return known
        self.start()
        grammar = self._ask(structure)
        self._remember(grammar)
        return grammar

    def _ask(self, structure: Structure) -> "Grammar":
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(structure) + b"\n")
        process.stdin.flush()
        if self._maker is None:  # while the process next door tries
            making = importlib.import_module("engine.structures.grammar")
            self._maker = making.GrammarMaker(self._directory)
        verdict = msgspec.json.decode(process.stdout.readline(), type=Verdict)
        return self._maker.make(structure, verdict)

    def _remember(self, grammar: "Grammar") -> None:
        self._cache[grammar.structure] = grammar
        self._num_bytes += _weight(grammar)
        while self._num_bytes > CACHE_BYTES_MAX or len(self._cache) > CACHE_ENTRIES_MAX:
            _, forgotten = self._cache.popitem(last=False)
            self._num_bytes -= _weight(forgotten)


def _weight(grammar: "Grammar") -> int:
    own = 0 if grammar.compiled is None else grammar.compiled.memory_size_bytes
    return own + ENTRY_BYTES + len(grammar.structure.source)
