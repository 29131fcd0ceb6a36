"""`python -m engine.structures.process DIRECTORY TIMEOUT_S`: tries where nothing can be hurt.

A schema may keep the compiler busy for minutes, eat memory or overflow its stack. So each one is
compiled first in a fork of this process, which has the tokenizer ready: a fork costs milliseconds, and
one that takes too long or too much is killed. What is left of a trial is its outcome: the worker then
compiles for itself what is known to be harmless. (To hand the grammar over took ten times as long as to
compile it: xgrammar's serialized form grows with the square of the number of tools.)

One JSON line in, one out: a `Structure`, then `{}` or `{"refused": …}`.
"""

import functools
import importlib
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine.messages import Structure
from engine.structures.lean_xgrammar import import_lean
from engine.tokenization import Tokenizer
from kernels.cpu.heap import release_freed_memory

MEMORY_BYTES_MAX = 512 * 1024**2
"""What one compilation may allocate beyond what is there already."""
STACK_BYTES = 4 * 1024**2
"""Of a trial: half of what the worker's threads have."""
READ_BYTES = 1 << 20
MESSAGE_LENGTH_MAX = 300
NO_COMPILER = (
    "No form can be required of this model's answers: it has no tokenizer that one can be made for."
)

Try = Callable[[Structure], object]
"""Compiles a structure, and raises what the compiler raises."""


class Verdict(msgspec.Struct, omit_defaults=True):
    """The answer to one structure: it can be compiled, or why it cannot."""

    refused: str | None = None


def serve(try_one: Try, timeout_s: float) -> None:
    """Answer line by line until the worker closes the pipe."""
    for line in sys.stdin.buffer:
        _say(_try_apart(try_one, line, timeout_s))


def refuse(reason: str) -> None:
    """Answer every line with the same refusal."""
    for _ in sys.stdin.buffer:
        _say(msgspec.json.encode(Verdict(refused=reason)))


def _say(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


def _try_apart(try_one: Try, line: bytes, timeout_s: float) -> bytes:
    """Try in a fork, and kill it when its time is over."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_fork(try_one, line, writer)
    os.close(writer)
    answer = _read_until(reader, time.monotonic() + timeout_s)
    os.close(reader)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer and status == 0:
        return answer
    reason = "too large or too deep" if answer is not None else "too complex to compile in time"
    return msgspec.json.encode(Verdict(refused=f"The required form is {reason}."))


def _be_the_fork(try_one: Try, line: bytes, writer: int) -> None:
    """Never returns."""
    status = 1
    try:
        _bound_memory()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(_answer(try_one, line)))
        status = 0
    finally:
        os._exit(status)


def _answer(try_one: Try, line: bytes) -> Verdict:
    structure = msgspec.json.decode(line, type=Structure)
    try:
        _with_small_stack(try_one, structure)
    except MemoryError:
        return Verdict(refused="The required form is too large or too deep.")
    except (RuntimeError, ValueError, RecursionError) as error:
        # "[12:00:00] /project/cpp/file.cc:94: Regex parsing error …"
        message = str(error).strip().split(": ", 1)[-1] or "the compiler gives no reason"
        return Verdict(refused=f"The required form is not valid: {message[:MESSAGE_LENGTH_MAX]}")
    return Verdict()


def _with_small_stack(try_one: Try, structure: Structure) -> None:
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(try_one, structure).result()


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
        try_one = _try_for(directory)
    except Exception as fault:  # a foreign tokenizer may fail in any way
        sys.stderr.write(f"no grammars for its tokenizer: {fault}\n")
        refuse(NO_COMPILER)
    else:
        serve(try_one, timeout_s)


def _try_for(directory: Path) -> Try:
    # Imported here: before it, xgrammar must have been imported without torch.
    compilation = importlib.import_module("engine.structures.compilation")
    compiler = compilation.create_compiler(Tokenizer.load(directory))
    release_freed_memory()  # reading the tokenizer took 20 MB that nobody needs again
    return functools.partial(compilation.compile_structure, compiler)


if __name__ == "__main__":
    main()
