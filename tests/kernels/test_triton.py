"""The Triton kernels, with no GPU: right in the interpreter, and compilable for the GPUs we target."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


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
