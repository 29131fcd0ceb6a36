"""`python -m infra.gpu_check.inventory`: versions, the GPU, and whether all is there that is called.

The product is made for torch 2.11 with Triton 3.6 up to torch 2.13 with Triton 3.7. What differs between
them is looked for by name, so that a machine with another pair says at once what it lacks.
"""

import importlib
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "transformers",
    "flash-attn",
    "flashinfer-python",
)
NEEDED = (
    "torch.Event",
    "torch.Stream",
    "torch.cuda.CUDAGraph",
    "torch.cuda.graph_pool_handle",
    "torch.cuda.mem_get_info",
    "torch.nn.attention.sdpa_kernel",
    "torch._C._distributed_c10d.ProcessGroupGloo",
    "torch._C._distributed_c10d.TCPStore",
    "triton.jit",
    "triton.language.dot",
    "triton.compiler.ASTSource",
    "triton.backends.compiler.GPUTarget",
)
"""Without these nothing works."""
USED_WHERE_THERE = (
    "torch.distributed.ProcessGroupNCCL",
    "torch._scaled_mm",
    "torch.float8_e4m3fn",
    "triton.set_allocator",
    "triton.language.make_tensor_descriptor",
    "triton.language.range",
)
"""Without these a slower way is taken, or a feature is refused."""


def missing(names: tuple[str, ...]) -> list[str]:
    """Those that this machine's packages do not have."""
    return [name for name in names if not _is_there(name)]


def main() -> int:
    """Print it all; 1 where something is missing that nothing works without."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {_version(package)}")
    _print_gpus()
    lacking, lesser = missing(NEEDED), missing(USED_WHERE_THERE)
    print("missing, needed: " + (", ".join(lacking) or "nothing"))
    print("missing, done without: " + (", ".join(lesser) or "nothing"))
    return int(bool(lacking))


def _is_there(name: str) -> bool:
    """A dotted name: as many parts as possible are a module, the rest attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _print_gpus() -> None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        print("no nvidia-smi on the PATH")
        return
    fields = "--query-gpu=name,compute_cap,memory.total,driver_version,power.limit"
    ran = subprocess.run(
        [tool, fields, "--format=csv"], capture_output=True, text=True, timeout=20, check=False
    )
    print((ran.stdout or ran.stderr).strip())


if __name__ == "__main__":
    sys.exit(main())
