"""Runs a module of ours in a process of its own: what needs torch, or may not hurt the supervisor."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.errors import SetUpFailed

Progress = Callable[[str], None]


def run_module(module: str, arguments: Sequence[str], progress: Progress, *, failed: str) -> None:
    """`python -m module arguments`; each line that it prints is progress.

    Raises SetUpFailed: what `failed` says, and the last line of what it complained.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONWARNINGS": "ignore",
    }
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                progress(line.strip())
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        if status != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or [f"exit status {status}"])[-1]
            raise SetUpFailed(f"{failed}: {last}")


def say(line: str) -> None:
    """Progress, in the child."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
