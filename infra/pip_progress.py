"""Runs pip and tells what it does: which package, how far, how long, how many bytes.

Standard library only. Any pip will do (Debian's is old and cannot report its progress to another
program), so the bytes are measured where they arrive: in a temporary folder of our own.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

TICK_S = 0.25
QUIET_TICK_S = 10.0
"""How often a pipe (a log file, CI) hears of progress; a terminal's line changes every TICK_S."""
NOTABLE_BYTES = 5_000_000
SIZE = re.compile(r"\(([\d.]+) (kB|MB|GB)\)")
WRAPPERS = (
    "\N{MULTIPLICATION SIGN}",
    "error: subprocess-exited",
    "error: metadata-generation",
    "note:",
)
"""What pip prints around the line that says what went wrong."""
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


class InstallFailed(Exception):
    """pip gave up; the message is one line that says why and where its log is."""


@dataclass
class Stage:
    """What pip is at, read from its output by one thread and shown by another."""

    doing: str = "looking up versions"
    started: float = field(default_factory=time.monotonic)
    num_to_install: int = 0
    num_before: int = 0
    downloaded_bytes: float = 0.0


def run_pip(environment: Path, heading: str, arguments: list[str]) -> None:
    """`pip install ARGUMENTS` in `environment`; raises InstallFailed with pip's own last error."""
    temporary = environment / "download"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [str(environment / "bin" / "python"), "-I", "-m", "pip", "install"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", *arguments]
    log = environment / "pip.log"
    stage = Stage(num_before=_num_installed(environment))
    with log.open("a", encoding="utf-8") as record:
        record.write("$ " + " ".join(command) + "\n")
        with subprocess.Popen(
            command,
            cwd=environment,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as child:
            assert child.stdout is not None
            ticker = _Ticker(environment, temporary, heading, stage)
            ticker.start()
            try:
                complaints = _follow(child.stdout, record, stage)
                status = child.wait()
            finally:
                ticker.stop()
                child.kill()
    shutil.rmtree(temporary, ignore_errors=True)
    if status != 0:
        raise InstallFailed(f"{_reason(complaints)} (all of it: {log})")


def _follow(output: Iterable[str], record: TextIO, stage: Stage) -> list[str]:
    """Read pip's lines to the end, keeping `stage` current; returns those that tell of errors."""
    complaints = []
    for line in output:
        record.write(line)
        _advance(stage, line.strip())
        if "error" in line.lower() or "no space left" in line.lower():
            complaints.append(line.strip())
    return complaints


def _advance(stage: Stage, line: str) -> None:
    """Move `stage` on by one line of pip's output."""
    if line.startswith("Downloading ") and ".metadata" not in line:
        size = SIZE.search(line)
        num_bytes = float(size.group(1)) * UNITS[size.group(2)] if size else 0.0
        stage.downloaded_bytes += num_bytes
        name = line.split()[1].rsplit("/", 1)[-1]
        stage.doing = "downloading " + "-".join(name.split("-")[:2])
        if size:
            stage.doing += f" {size.group(0)}"
        if num_bytes >= NOTABLE_BYTES and not sys.stdout.isatty():
            print("    " + stage.doing, flush=True)
    elif line.startswith("Collecting ") and stage.doing.startswith("looking"):
        stage.doing = "looking up versions: " + line.split()[1]
    elif line.startswith("Installing collected packages: "):
        stage.num_to_install = line.count(",") + 1
        stage.doing = "installing"


def _reason(complaints: list[str]) -> str:
    """The line of pip's output that a user can act on."""
    for line in complaints:
        if "No space left" in line:
            return "disk full while installing; make room, then run again"
    for line in complaints:
        if "No matching distribution" in line or "Could not find a version" in line:
            return line + " Is a package index reachable?"
    telling = [line for line in complaints if not line.startswith(WRAPPERS)]
    return (telling or complaints or ["pip failed without saying why"])[-1]


def _num_installed(environment: Path) -> int:
    return sum(1 for _ in environment.glob("lib/python3*/site-packages/*.dist-info"))


def _arrived_bytes(folder: Path) -> int:
    """Bytes under `folder`, which pip is changing while we look."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size  # noqa: PTH116, PTH118
            except OSError:
                continue  # moved on between listing and looking
    return total


class _Ticker(threading.Thread):
    """Shows the stage on one line that changes (terminal), or now and then (pipe)."""

    def __init__(self, environment: Path, temporary: Path, heading: str, stage: Stage) -> None:
        super().__init__(daemon=True)
        self.environment, self.temporary = environment, temporary
        self.heading, self.stage = heading, stage
        self.ended = threading.Event()

    def run(self) -> None:
        is_terminal = sys.stdout.isatty()
        while not self.ended.wait(TICK_S if is_terminal else QUIET_TICK_S):
            width = shutil.get_terminal_size().columns - 1
            if is_terminal:
                print("\r\x1b[K" + self.line()[:width], end="", flush=True)
            else:
                print(self.line(), flush=True)
        if is_terminal:
            print("\r\x1b[K", end="", flush=True)

    def line(self) -> str:
        """Such as `installing 31 of 97, 14 s` or `downloading torch-2.13.0: 88 MB here, 9 s`."""
        text = "    " + self.stage.doing
        if self.stage.num_to_install:
            num_done = _num_installed(self.environment) - self.stage.num_before
            text += f" {max(0, num_done)} of {self.stage.num_to_install}"
        elif arrived := _arrived_bytes(self.temporary):
            text += f": {arrived / 1e6:.0f} MB here"
        return text + f", {time.monotonic() - self.stage.started:.0f} s"

    def stop(self) -> None:
        """Stop showing, and leave the line clean."""
        self.ended.set()
        self.join()
