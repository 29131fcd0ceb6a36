"""`python -m engine.structures.process DIRECTORY TIMEOUT_S`: compiles where nothing can be hurt.

A schema may keep the compiler busy for minutes, eat memory or overflow its stack. So each one is
compiled in a fork of this process, which has the tokenizer ready: a fork costs milliseconds, and one
that takes too long or too much is killed. The worker reads the result and never compiles itself.

One JSON line in, one out: a `Structure`, then `{"grammar": …}` or `{"refused": …}`.
"""

import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

import msgspec
import xgrammar

from engine.messages import WHITESPACE_MAX, Structure
from engine.tokenization import Tokenizer

MEMORY_BYTES_MAX = 2 * 1024**3
"""What one compilation may allocate beyond what is there already."""
READ_BYTES = 1 << 20
MESSAGE_LENGTH_MAX = 300


class Compiled(msgspec.Struct, omit_defaults=True):
    """The answer to one structure: a serialized grammar, or why there is none."""

    grammar: str | None = None
    refused: str | None = None


def tokenizer_info(tokenizer: Tokenizer) -> xgrammar.TokenizerInfo:
    """The vocabulary as the grammar engine needs it.

    Control tokens spell what no text contains (0xFF begins no character), so that they are never
    taken for text, and yet can be named: the engine refuses a token that spells nothing.
    """
    vocabulary = [
        b"\xff%d" % token_id
        if token_id in tokenizer.special_token_ids
        else tokenizer.token_text(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(tokenizer.eos_token_ids),
    )


def compile_structure(
    compiler: xgrammar.GrammarCompiler, structure: Structure
) -> xgrammar.CompiledGrammar:
    """The grammar of `structure`. Raises RuntimeError with the compiler's own words."""
    if structure.kind == "regex":
        return compiler.compile_regex(structure.source)
    if structure.kind == "ebnf":
        return compiler.compile_grammar(structure.source)
    if structure.kind == "structural_tag":
        return compiler.compile_structural_tag(structure.source)
    return compiler.compile_json_schema(structure.source, max_whitespace_cnt=WHITESPACE_MAX)


def serve(compiler: xgrammar.GrammarCompiler, timeout_s: float) -> None:
    """Answer line by line until the worker closes the pipe."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_compile_apart(compiler, line, timeout_s) + b"\n")
        sys.stdout.buffer.flush()


def _compile_apart(compiler: xgrammar.GrammarCompiler, line: bytes, timeout_s: float) -> bytes:
    """Compile in a fork, and kill it when its time is over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_fork(compiler, line, writer)
    os.close(writer)
    answer = _read_until(reader, time.monotonic() + timeout_s)
    os.close(reader)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer and status == 0:
        return answer
    reason = "too large or too deep" if answer is not None else "too complex to compile in time"
    return msgspec.json.encode(Compiled(refused=f"The required form is {reason}."))


def _be_the_fork(compiler: xgrammar.GrammarCompiler, line: bytes, writer: int) -> None:
    """Never returns."""
    status = 1
    try:
        _bound_memory()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(_answer(compiler, line)))
        status = 0
    finally:
        os._exit(status)


def _answer(compiler: xgrammar.GrammarCompiler, line: bytes) -> Compiled:
    structure = msgspec.json.decode(line, type=Structure)
    try:
        return Compiled(grammar=compile_structure(compiler, structure).serialize_json())
    except (RuntimeError, ValueError, RecursionError) as error:
        # "[12:00:00] /project/cpp/file.cc:94: Regex parsing error …"
        message = str(error).strip().split(": ", 1)[-1]
        return Compiled(refused=f"The required form is not valid: {message[:MESSAGE_LENGTH_MAX]}")


def _bound_memory() -> None:
    """Limit the address space to what is mapped now and a little more (Linux tells; others not)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES_MAX, hard))


def _read_until(reader: int, deadline: float) -> bytes | None:
    """Everything up to the end of the pipe; None when the time is over before."""
    pieces: list[bytes] = []
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([reader], [], [], remaining)[0]:
            return None
        piece = os.read(reader, READ_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def main() -> None:
    """Load the tokenizer, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's; the pipe tells us
    directory, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    info = tokenizer_info(Tokenizer.load(directory))
    serve(xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), timeout_s)


if __name__ == "__main__":
    main()
