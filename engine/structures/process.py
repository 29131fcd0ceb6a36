"""`python -m engine.structures.process DIRECTORY TIMEOUT_S`: compiles where nothing can be hurt.

A schema may keep the compiler busy for minutes, eat memory or overflow its stack. So each one is
compiled in a fork of this process, which has the tokenizer ready: a fork costs milliseconds, and one
that takes too long or too much is killed. The worker reads the result and never compiles itself.

One JSON line in, one out: a `Structure`, then `{"grammar": …}` or `{"refused": …}`.
"""

import importlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.messages import Structure
from engine.structures.lean_xgrammar import import_lean
from engine.tokenization import Tokenizer

MEMORY_BYTES_MAX = 2 * 1024**3
"""What one compilation may allocate beyond what is there already."""
READ_BYTES = 1 << 20
MESSAGE_LENGTH_MAX = 300
NO_COMPILER = (
    "No form can be required of this model's answers: it has no tokenizer that one can be made for."
)

Compile = Callable[[Structure], str]
"""The serialized grammar. Raises what the compiler raises."""


class Compiled(msgspec.Struct, omit_defaults=True):
    """The answer to one structure: a serialized grammar, or why there is none."""

    grammar: str | None = None
    refused: str | None = None


def serve(compile_one: Compile, timeout_s: float) -> None:
    """Answer line by line until the worker closes the pipe."""
    for line in sys.stdin.buffer:
        _say(_compile_apart(compile_one, line, timeout_s))


def refuse(reason: str) -> None:
    """Answer every line with the same refusal."""
    for _ in sys.stdin.buffer:
        _say(msgspec.json.encode(Compiled(refused=reason)))


def _say(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


def _compile_apart(compile_one: Compile, line: bytes, timeout_s: float) -> bytes:
    """Compile in a fork, and kill it when its time is over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_fork(compile_one, line, writer)
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


def _be_the_fork(compile_one: Compile, line: bytes, writer: int) -> None:
    """Never returns."""
    status = 1
    try:
        _bound_memory()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(_answer(compile_one, line)))
        status = 0
    finally:
        os._exit(status)


def _answer(compile_one: Compile, line: bytes) -> Compiled:
    structure = msgspec.json.decode(line, type=Structure)
    try:
        return Compiled(grammar=compile_one(structure))
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
    import_lean()
    try:
        compile_one = _compile_for(directory)
    except Exception as fault:  # a foreign tokenizer may fail in any way
        sys.stderr.write(f"no grammars for its tokenizer: {fault}\n")
        refuse(NO_COMPILER)
    else:
        serve(compile_one, timeout_s)


def _compile_for(directory: Path) -> Compile:
    # Imported here: before it, xgrammar must have been imported without torch.
    compilation = importlib.import_module("engine.structures.compilation")
    compiler = compilation.create_compiler(Tokenizer.load(directory))

    def compile_one(structure: Structure) -> str:
        serialized: str = compilation.compile_structure(compiler, structure).serialize_json()
        return serialized

    return compile_one


if __name__ == "__main__":
    main()
