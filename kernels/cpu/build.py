"""Compiles the C++ beside this file into a shared library: once per source, compiler and machine.

The result is for this very machine (`-march=native`), so it is never shipped. No compiler, or a
machine without AVX2, is a reason and not an error: the operations then run in plain torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    # gcc 12 says it of its own intrinsics
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
NATIVE = ("-march=native",)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where the library is, or why there is none."""

    path: Path | None
    reason: str

    def __str__(self) -> str:
        return self.reason if self.path is None else f"{self.path.name}: {self.reason}"


def build(cache_directory: Path, target: tuple[str, ...] = NATIVE) -> BuildResult:
    """Build into `cache_directory`, or find what was built before. Takes about ten seconds."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return BuildResult(None, f"no C++ kernels for {platform.machine()} yet")
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return BuildResult(None, "no C++ compiler found (g++); plain torch computes instead")
    if not _has_avx2():
        return BuildResult(None, "this processor has no AVX2; plain torch computes instead")
    library = cache_directory / f"libncompass-{_fingerprint(compiler, target)}.so"
    if library.exists():
        return BuildResult(library, "built before")
    return _compile(compiler, target, library)


def _compile(compiler: str, target: tuple[str, ...], library: Path) -> BuildResult:
    library.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        output = Path(directory) / library.name
        command = [compiler, *FLAGS, *target, *sources, "-o", str(output)]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return BuildResult(None, f"{compiler} took longer than {TIMEOUT_S} s")
        if ran.returncode != 0:
            complaint = next(
                (line for line in ran.stderr.splitlines() if "error" in line), "no error message"
            )
            return BuildResult(None, f"{compiler} failed: {complaint}")
        os.replace(output, library)
    return BuildResult(library, f"built by {Path(compiler).name}")


def _fingerprint(compiler: str, target: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    digest.update(version.stdout + " ".join([*FLAGS, *target]).encode() + _cpu_flags().encode())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _has_avx2() -> bool:
    flags = _cpu_flags().split()
    return not flags or {"avx2", "fma"} <= set(flags)
