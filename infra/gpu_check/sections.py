"""What is checked, each part in a process of its own with a time limit of its own.

A part that fails, hangs or is killed is reported as that, and the others run all the same. Together the
limits stay below ten minutes. Only the standard library is needed here: whatever else is missing on a
machine is the finding of a part, and no reason to report nothing.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TAIL_CHARACTERS = 4000
KERNEL_SAMPLE = ("rms_norm_1024", "silu_and_mul")


@dataclass(frozen=True, slots=True)
class Section:
    """A command, how long it may take, and what it says when it is well."""

    name: str
    command: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a section went."""

    name: str
    status: str
    """`passed`, `failed` or `timed out`."""
    seconds: float
    output: str
    """The end of it."""


def gpu_sections(out: Path) -> list[Section]:
    """With a GPU: correctness first, then speed."""
    return [
        _module("versions and API", 60, "infra.gpu_check.inventory"),
        _pytest("kernels against the reference", 150, "tests/gpu/test_kernels_on_gpu.py"),
        _pytest("engine: graphs, copies, no waits", 120, "tests/gpu/test_engine_on_gpu.py"),
        _module("benchmarks", 180, "kernels.benchmarks", "--json", str(out / "kernels.json")),
        _module("ahead-of-time sample", 60, "kernels.check", *KERNEL_SAMPLE),
    ]


def sections_without_gpu() -> list[Section]:
    """Without one: what can be said all the same."""
    return [
        _module("versions and API", 60, "infra.gpu_check.inventory"),
        _module(
            "kernels: interpreted, and compiled", 400, "pytest", "tests/kernels/test_triton.py"
        ),
        _module("predictions of the static model", 60, "kernels.benchmarks"),
    ]


def run(section: Section) -> Outcome:
    """Run it to its end or its limit."""
    began_s = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        section.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=section.timeout_s)
        status = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with whatever it has started
        output, _ = process.communicate()
        status = f"timed out after {section.timeout_s:.0f} s"
    seconds = time.monotonic() - began_s
    return Outcome(section.name, status, round(seconds, 1), output[-TAIL_CHARACTERS:])


def _module(name: str, timeout_s: float, module: str, *arguments: str) -> Section:
    return Section(name, (sys.executable, "-m", module, *arguments), timeout_s)


def _pytest(name: str, timeout_s: float, path: str) -> Section:
    options = ("-q", "-p", "no:cacheprovider", "-c", "tests/gpu/pytest.ini")
    return _module(name, timeout_s, "pytest", path, *options)
