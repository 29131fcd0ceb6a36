"""A whole platform for a benchmark: `ncompass up` on state of its own, in its own processes."""

import json
import os
import re
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

from kernels.cpu.memory import HUGE_PAGE
from tests.bench.peers.processes import tree, tree_cpu_s
from tests.services import free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
MIB = 1024 * 1024
PLAIN = {"NCOMPASS_ENGINE_IS_SPECULATION_ON": "false"}
MAPPING = re.compile("([0-9a-f]+)-([0-9a-f]+) ")
"""The first line of each mapping in smaps."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The engine worker's process and what it serves."""

    dtype: str
    num_threads: int
    resident_mb: float
    """With the processes that it has started."""
    model_mb: float
    kv_mb: float
    """KV cache that is in memory so far; the rest of the pool takes none yet."""

    @property
    def over_mb(self) -> float:
        """What it takes beside weights and KV cache."""
        return self.resident_mb - self.model_mb - self.kv_mb


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
        stored = sum(p.stat().st_size for p in self.model_directory.glob("*.safetensors")) / 4
        kv_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
        kv_token *= config["head_dim"] * bytes_per_element
        pid = self.ready["pids"]["worker"]
        return WorkerFacts(
            dtype=dtype,
            num_threads=len(os.sched_getaffinity(0)),
            resident_mb=sum(map(_resident_bytes, tree(pid))) / MIB,
            model_mb=stored * (1 if "int8" in log else bytes_per_element) / MIB,
            kv_mb=pool_bytes_in_memory(pid, kv_token * self.metric("total_kv_tokens")) / MIB,
        )

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each part so far, with that of the processes that it has started.

        All are the supervisor's: its own is what remains.
        """
        seconds = {name: tree_cpu_s(pid) for name, pid in self.ready["pids"].items()}
        others = sum(seconds.values()) - seconds["supervisor"]
        return seconds | {"supervisor": seconds["supervisor"] - others}


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


def pool_bytes_in_memory(pid: int, pool_bytes: float) -> float:
    """How much of its KV cache a worker has touched, by /proc: of the mapping that is large enough.

    The system may have joined other memory to that mapping. What it is larger than the pool counts
    as not of the pool, all of it in memory.
    """
    size = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := MAPPING.match(line):
            size = int(mapping[2], 16) - int(mapping[1], 16)
        elif line.startswith("Rss:") and size >= pool_bytes:
            return int(line.split()[1]) * 1024 - max(0.0, size - pool_bytes - HUGE_PAGE)
    return 0.0
