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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # A product and a sum are fused where the source says so and nowhere else: two paths that must
    # agree to the last bit must not depend on what the compiler saw fit to fuse.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # gcc 12 says it of its own intrinsics
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
NATIVE = ("-march=native",)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where the library is, or why there is none."""

    path: Path | None
    reason: str

    def __str__(self) -> str:
        return self.reason if self.path is None else f"{self.path.name}: {self.reason}"


def build(cache_directory: Path, target: tuple[str, ...] = NATIVE) -> BuildResult:
    """Build into `cache_directory`, or find what was built before. Takes half a minute of one core."""
    if platform.machine() not in {"x86_64", "AMD64"} or platform.system() != "Linux":
        here = f"{platform.system()} on {platform.machine()}"
        return BuildResult(None, f"no C++ kernels for {here} yet; plain torch computes instead")
    if not {"avx2", "fma"} <= set(_cpu_flags().split()):
        return BuildResult(None, "this processor has no AVX2; plain torch computes instead")
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return BuildResult(None, "no C++ compiler found (g++); plain torch computes instead")
    try:
        library = cache_directory / f"libncompass-{_fingerprint(compiler, target)}.so"
        if library.exists():
            return BuildResult(library, "built before")
        return _compile(compiler, target, library)
    except (OSError, subprocess.SubprocessError) as error:
        return BuildResult(None, f"the C++ kernels could not be built: {error}")


def _compile(compiler: str, target: tuple[str, ...], library: Path) -> BuildResult:
    """Compile the files side by side, link, and move the result into place in one step."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as directory:
        output = Path(directory) / library.name
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, *target, "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            complaints = list(pool.map(_run, commands))
        if not any(complaints):
            link = [compiler, *FLAGS, *target, "-shared", *map(str, objects), "-o", str(output)]
            complaints = [_run(link)]
        if complaint := next(filter(None, complaints), None):
            return BuildResult(None, f"{Path(compiler).name} failed: {complaint}")
        output.replace(library)
    return BuildResult(library, f"built by {Path(compiler).name}")


def _run(command: list[str]) -> str | None:
    """What the compiler complained about, if it failed."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if ran.returncode == 0:
        return None
    lines = ran.stderr.strip().splitlines()
    fallback = lines[-1] if lines else f"exit status {ran.returncode}"
    return next((line for line in lines if "error" in line), fallback)


def _fingerprint(compiler: str, target: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S
    )
    digest.update(version.stdout + " ".join([*FLAGS, *target]).encode() + _cpu_flags().encode())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    """What this processor can do, as the kernel lists it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")
