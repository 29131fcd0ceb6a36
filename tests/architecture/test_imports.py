"""What a process must never load: the API tier carries no tensors."""

import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "triton", "kernels", "celery"]


@pytest.mark.parametrize("module", ["api.app", "web.app", "infra.asgi"])
def test_the_api_tier_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "[]"


def test_the_billing_process_never_imports_torch() -> None:
    code = "import sys, billing.celery_app, billing.tasks; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "False"
