"""What an API process does to itself before it serves."""

import subprocess
import sys


def test_a_process_raises_its_limit_of_descriptors() -> None:
    code = (
        "import resource; from infra.api_server import raise_descriptor_limit;"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); raise_descriptor_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "True"
