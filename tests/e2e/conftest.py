"""One real platform for all end-to-end tests: started as a user starts it, stopped as a user does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernels.cpu.build import NATIVE
from tests.kernels.cpu_builds import KERNELS, built
from tests.services import free_port

ROOT = Path(__file__).parents[2]
NCOMPASS = Path(sys.executable).with_name("ncompass")
START_TIMEOUT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share one platform: last of all, and in the order of the file (its last test stops it)."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.location[1] or 0 if here in item.path.parents else -1)


@dataclass(frozen=True)
class RunningPlatform:
    """`ncompass up` in a process of its own."""

    process: "subprocess.Popen[bytes]"
    var: Path
    port: int

    @property
    def ready(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.var / "ready.json").read_text())
        return facts

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"VAR": str(self.var), "PORT": str(self.port)}

    def running_sequences(self) -> float:
        """What the workers say in the metrics."""
        lines = httpx.get(self.ready["metrics_url"]).text.splitlines()
        name = "ncompass_worker_running_sequences{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def ncompass(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(NCOMPASS), *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def wait_until(claim: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def platform(
    tmp_path_factory: pytest.TempPathFactory, default_model_directory: Path
) -> Iterator[RunningPlatform]:
    var = tmp_path_factory.mktemp("platform") / "var"
    (var / "models").mkdir(parents=True)
    # The conversion and the build are tested by themselves; here both are there already.
    (var / "models" / default_model_directory.name).symlink_to(default_model_directory)
    built(NATIVE)
    (var / "kernels").symlink_to(KERNELS)
    port = free_port()
    output = (var / "output.txt").open("wb")
    process = subprocess.Popen(
        [str(NCOMPASS), "up"],
        env=os.environ | {"VAR": str(var), "PORT": str(port)},
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    running = RunningPlatform(process, var, port)
    try:
        wait_until(
            lambda: (var / "ready.json").exists() or process.poll() is not None,
            START_TIMEOUT_S,
            "the platform is ready",
        )
        assert process.poll() is None, (var / "output.txt").read_text()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=90)
        output.close()
