"""A whole platform for a benchmark: `ncompass up` on state of its own, in its own processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.services import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
MIB = 1024 * 1024
PLAIN = {"NCOMPASS_ENGINE_IS_SPECULATION_ON": "false"}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The engine worker's process and what it serves."""

    dtype: str
    num_threads: int
    resident_mb: float
    model_mb: float
    kv_mb: float
    """KV cache that has been written so far; the rest of the pool takes no memory yet."""


@dataclass(frozen=True, slots=True)
class BenchPlatform:
    """Addresses and processes of the running platform."""

    ready: dict[str, Any]
    var: Path

    @property
    def model_directory(self) -> Path:
        """The served checkpoint."""
        return self.var / "models" / self.ready["model"].replace("/", "--")

    def metric(self, name: str) -> float:
        """Sum of a worker's gauge over the workers."""
        lines = httpx.get(self.ready["metrics_url"]).text.splitlines()
        prefix = f"ncompass_worker_{name}{{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(prefix))

    def worker_facts(self) -> WorkerFacts:
        """Memory from /proc, precision from the worker's own log."""
        log = (self.var / "logs" / "worker.log").read_text()
        dtype = "bf16" if "dtype=bf16" in log else "fp32"
        bytes_per_element = 2 if dtype == "bf16" else 4
        config = json.loads((self.model_directory / "config.json").read_text())
        weights = sum(p.stat().st_size for p in self.model_directory.glob("*.safetensors"))
        kv_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
        kv_token *= config["head_dim"] * bytes_per_element
        written = min(self.metric("prefill_tokens") + self.metric("output_tokens"),
                      self.metric("total_kv_tokens"))  # fmt: skip
        return WorkerFacts(
            dtype=dtype,
            num_threads=len(os.sched_getaffinity(0)),
            resident_mb=_resident_bytes(self.ready["pids"]["worker"]) / MIB,
            model_mb=weights / 4 * bytes_per_element / MIB,
            kv_mb=written * kv_token / MIB,
        )

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each part so far."""
        return {name: _cpu_seconds(pid) for name, pid in self.ready["pids"].items()}


@contextmanager
def run_platform(settings: Mapping[str, str] | None = None) -> Iterator[BenchPlatform]:
    """Start on a temporary state directory that borrows `var/models` and `var/kernels`; stop at the end.

    `settings` are environment variables (`NCOMPASS_…`) beside those of this process. Unless they say
    otherwise nothing is guessed ahead: limits and peers compute every token.
    """
    with tempfile.TemporaryDirectory(prefix="nc-bench-") as directory:
        var = Path(directory)
        for name in ("models", "kernels"):
            shared = ROOT / "var" / name
            shared.mkdir(parents=True, exist_ok=True)
            (var / name).symlink_to(shared)
        with (var / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("ncompass")), "up"],
                env=os.environ
                | PLAIN
                | dict(settings or {})
                | {"VAR": str(var), "PORT": str(free_port())},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (var / "ready.json").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((var / "output.txt").read_text())
                time.sleep(0.2)
            yield BenchPlatform(json.loads((var / "ready.json").read_text()), var)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
