"""The tests of the C++ kernels once more, with every access to memory and every overflow watched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import NATIVE, SANITIZED, build
from tests.kernels.cpu_builds import KERNELS

TESTS = [f"tests/kernels/test_cpu_{name}.py" for name in (
    "attention", "linear", "int8", "elementwise", "invariance", "sampling"
)]  # fmt: skip
TESTS += ["tests/engine/test_invariance.py"]  # whole steps of a decoder
# Page boundaries, odd sizes and refusals; the many shapes of the plain run add nothing here.
SKIPPED = "not any_batch and not batch and not draws_follow and not avx2"

RUN = """
import sys
import pytest
from kernels.cpu import build
build.NATIVE = build.NATIVE + build.SANITIZED  # before any test asks for it
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sanitizers_find_nothing() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the sanitizer run needs g++")
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip("g++ has no sanitizer runtimes here")
    built = build(KERNELS, NATIVE + SANITIZED)
    assert built.path is not None, built.reason
    ran = subprocess.run(
        [sys.executable, "-c", RUN, *TESTS, "-q", "-k", SKIPPED, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
        env=os.environ
        | {
            "LD_PRELOAD": ":".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it keeps
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    )
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    assert " passed" in ran.stdout
