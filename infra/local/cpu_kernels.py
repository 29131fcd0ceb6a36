"""Builds the C++ kernels once per source and compiler, in a process of its own (it imports torch).

No compiler is a notice, not a stop: the kernels then run as plain torch.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.local.wiring import ROOT

TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """What became of the build."""

    is_built: bool
    note: str


def build(cache: Path) -> KernelBuild:
    """Build into `cache` (at once when it is there); never raises for want of a compiler."""
    cache.mkdir(parents=True, exist_ok=True)
    try:
        child = subprocess.run(
            [sys.executable, "-m", "infra.local.cpu_kernels", str(cache)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return KernelBuild(False, f"the compiler took longer than {TIMEOUT_S} s")
    spoken = (child.stdout or child.stderr).strip().splitlines()
    note = spoken[-1] if spoken else f"exit status {child.returncode}"
    return KernelBuild(child.returncode == 0, note)


if __name__ == "__main__":
    from kernels.cpu.build import build as build_library

    built = build_library(Path(sys.argv[1]))
    sys.stdout.write(f"{built}\n")
    sys.exit(built.path is None)
