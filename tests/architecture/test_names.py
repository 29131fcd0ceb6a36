"""transformers probes for a package named `kernels`; ours of that name must stay harmless."""

import subprocess
import sys
from importlib import metadata

import pytest


def test_no_distribution_but_ours_owns_the_name_kernels() -> None:
    owners = metadata.packages_distributions().get("kernels", [])
    assert set(owners) <= {"ncompass-platform"}


def test_our_version_is_outside_the_range_that_transformers_takes_for_its_own() -> None:
    version = tuple(int(part) for part in metadata.version("ncompass-platform").split("."))
    assert not (0, 18, 2) <= version < (0, 19, 0)


@pytest.mark.slow
def test_transformers_models_import_beside_our_kernels() -> None:
    code = (
        "import kernels; from transformers.utils import is_kernels_available;"
        "from transformers.models.llama import modeling_llama;"
        "from transformers.models.qwen3 import modeling_qwen3;"
        "assert kernels.__version__ == '0.1.0' and not is_kernels_available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
