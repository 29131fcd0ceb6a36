"""Structured output in the worker: compiled grammars, and where each choice stands in its own.

`GrammarCompiler` asks the process next door (`engine.grammar_process`), `StructureDesk` does so off
the step loop, `StructureState` masks what the grammar forbids before a token is chosen.
"""

import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import torch
import xgrammar

from engine.errors import ModelRefused
from engine.grammar_process import Compiled, tokenizer_info
from engine.messages import GenerateRequest, Structure
from engine.settings import EngineSettings
from engine.tokenization import Tokenizer
from engine.worker.mailbox import Mailbox

logger = structlog.get_logger(__name__)

CACHE_BYTES_MAX = 256 * 1024**2
CACHE_ENTRIES_MAX = 1_000
ENTRY_BYTES = 1_024
"""What an entry weighs beside its grammar; a refusal weighs only that."""
SLOW_STEP_S = 0.02
"""Of one sequence's grammar, on the engine's thread; the masks of JSON take less than 2 ms."""
SLOW_STEPS_MAX = 10
NO_COMPILER = (
    "No form can be required of this model's answers: it has no tokenizer that one can be made for."
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled structure, or why it was refused."""

    structure: Structure
    compiled: xgrammar.CompiledGrammar | None
    refusal: str = ""

    def start(self, emitted: list[int]) -> "StructureState":
        """The state of a choice that has `emitted` tokens already."""
        assert self.compiled is not None
        state = StructureState(xgrammar.GrammarMatcher(self.compiled), self.structure.begins_after)
        for token_id in emitted:
            state.accept(token_id)
        return state


class StructureState:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, begins_after: int | None) -> None:
        self._matcher = matcher
        self._begins_after = begins_after
        self._num_slow_steps = 0

    @property
    def is_too_slow(self) -> bool:
        """Whether following this grammar holds up the steps of everybody.

        An ambiguous one, such as `(a*)*b`, costs more with every token: 60 ms after 170 of them.
        """
        return self._num_slow_steps >= SLOW_STEPS_MAX

    def fork(self) -> "StructureState":
        """The state of another choice that has the same tokens."""
        return StructureState(self._matcher.fork(), self._begins_after)

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        if self._begins_after is not None:
            if token_id == self._begins_after:
                self._begins_after = None
        elif not self._matcher.is_terminated():
            began_s = time.thread_time()
            is_allowed = self._matcher.accept_token(token_id)
            self._note_time(began_s)
            assert is_allowed, f"token {token_id} breaks the grammar"

    def mask(self, row: torch.Tensor) -> None:
        """row: [vocab] fp32, contiguous. What the grammar forbids now becomes -inf."""
        if self._begins_after is None and not self._matcher.is_terminated():
            bitmask = xgrammar.allocate_token_bitmask(1, len(row))
            began_s = time.thread_time()
            self._matcher.fill_next_token_bitmask(bitmask)
            self._note_time(began_s)
            xgrammar.apply_token_bitmask_inplace(row, bitmask[0].to(row.device))

    def _note_time(self, began_s: float) -> None:
        self._num_slow_steps += time.thread_time() - began_s > SLOW_STEP_S


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
            command = [sys.executable, "-m", "engine.grammar_process"]
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


class FairLine:
    """Requests in line for the compiler: next goes the tenant that has used the least of it.

    So whoever sends one hostile form after another waits for himself.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._lines: dict[str, deque[GenerateRequest]] = {}
        self._used_s: dict[str, float] = {}
        self._is_closed = False

    def put(self, request: GenerateRequest) -> None:
        """Stand in line. Somebody new has used as much as the least of those who wait."""
        with self._arrived:
            if request.tenant not in self._used_s:
                waiting = [self._used_s[tenant] for tenant in self._lines]
                self._used_s[request.tenant] = min(waiting, default=0.0)
            self._lines.setdefault(request.tenant, deque()).append(request)
            self._arrived.notify()

    def get(self) -> GenerateRequest | None:
        """Wait for the next request; None once the line is closed."""
        with self._arrived:
            while not self._lines and not self._is_closed:
                # Nobody waits: nobody is ahead of anybody.
                self._used_s.clear()
                self._arrived.wait()
            if self._is_closed:
                return None
            tenant = min(self._lines, key=self._used_s.__getitem__)
            request = self._lines[tenant].popleft()
            if not self._lines[tenant]:
                del self._lines[tenant]
            return request

    def charge(self, tenant: str, seconds: float) -> None:
        """The compiler has worked so long for `tenant`."""
        with self._arrived:
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + seconds

    def close(self) -> None:
        """No more."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify()


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request whose structure is compiled; no grammar where the compiler itself failed."""

    request: GenerateRequest
    grammar: Grammar | None


class StructureDesk:
    """Requests whose structure is being compiled, on a thread of its own (`run`).

    `take`, `withdraw` and `finish` are for the engine thread alone.
    """

    def __init__(self, directory: Path, mailbox: Mailbox, settings: EngineSettings) -> None:
        self._compiler = GrammarCompiler(directory, timeout_s=settings.structure_timeout_s)
        self._mailbox = mailbox
        self._line = FairLine()
        self._waiting: dict[str, GenerateRequest] = {}

    def take(self, request: GenerateRequest) -> None:
        """Have the structure of `request` compiled; the mailbox gets it back."""
        self._waiting[request.request_id] = request
        self._line.put(request)

    def finish(self, compiled: CompiledRequest) -> bool:
        """Whether the request is still wanted."""
        request = compiled.request
        if self._waiting.get(request.request_id) is not request:
            return False
        del self._waiting[request.request_id]
        return True

    def withdraw(
        self,
        request_id: str | None = None,
        attempt: int | None = None,
        *,
        nodes: set[str] | None = None,
    ) -> list[GenerateRequest]:
        """Give up one request up to `attempt`, those of some nodes, or all that are waiting."""
        found = [
            request
            for request in self._waiting.values()
            if request_id in (None, request.request_id)
            and (attempt is None or request.attempt <= attempt)
            and (nodes is None or request.node in nodes)
        ]
        for request in found:
            del self._waiting[request.request_id]
        return found

    def close(self) -> None:
        """End `run`, and the process behind it."""
        self._line.close()

    def run(self) -> None:
        """Compile what is asked, until closed; a thread's whole life."""
        try:
            self._compiler.start()
        except ModelRefused as refusal:
            logger.info("no structured output", reason=refusal.message)
        while (request := self._line.get()) is not None:
            assert request.structure is not None
            began_s = time.monotonic()
            grammar = None
            try:
                grammar = self._compiler.compile(request.structure)
            except (OSError, msgspec.MsgspecError, RuntimeError) as error:
                # The process next door is gone; the next request starts another.
                logger.error("grammar process failed", error=type(error).__name__)
                self._compiler.stop()
            self._line.charge(request.tenant, time.monotonic() - began_s)
            self._mailbox.order(compiled=[CompiledRequest(request, grammar)])
        self._compiler.stop()
