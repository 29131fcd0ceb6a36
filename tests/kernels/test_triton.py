"""The Triton kernels, with no GPU: right in the interpreter, and compilable for the GPUs we target."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels/interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    found = re.search(r"(\d+) passed", ran.stdout)
    assert found is not None
    assert int(found[1]) >= 80, "some were not collected"


def test_the_table_of_compiled_kernels_is_current() -> None:
    # Triton first: our kernels leave it alone where torch has no CUDA and nobody has imported it.
    code = "import sys, triton, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, "-q", "tests/kernels/test_check_table.py"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "3 passed" in ran.stdout or "2 passed, 1 skipped" in ran.stdout


@pytest.mark.slow
def test_one_of_each_kernel_compiles_for_an_h100_without_spills() -> None:
    # All shapes, types and targets take half an hour: `make check-kernels`.
    names = ["rms_norm_1024", "silu_and_mul", "rotary_g3_d64", "decode_g3_d64", "mixed_64_g3_d64"]
    ran = subprocess.run(
        [sys.executable, "-m", "kernels.check", *names, "--dtype", "bf16", "--target", "90"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "kernels=5 targets=1 compiled=5 spills=0"
