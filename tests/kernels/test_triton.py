"""The Triton kernels, with no GPU: right in the interpreter, and compilable for the GPUs we target."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == [
        "rms_norm=26",
        "decode=18",
        "prefill=18",
        "silu_and_mul=8",
        "rotary=8",
    ]


@pytest.mark.slow
def test_one_of_each_kernel_compiles_for_an_h100_without_spills() -> None:
    # All shapes, types and targets take three minutes: `make check-kernels`.
    names = ["rms_norm_1024", "silu_and_mul", "rotary_g3_d64", "decode_merge_g3_d64"]
    names += ["decode_split_g3_d64", "prefill_64_g3_d64"]
    ran = subprocess.run(
        [sys.executable, "-m", "kernels.check", *names, "--dtype", "bf16", "--target", "90"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "kernels=6 targets=1 compiled=6 spills=0"
    instructions = {
        line.split()[0]: int(line.split()[-1]) for line in ran.stdout.splitlines()[1:-1]
    }
    assert instructions["decode_split_g3_d64"] > 0
    assert instructions["prefill_64_g3_d64"] > 0
