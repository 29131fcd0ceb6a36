"""The processes of a platform that is made to suffer: each can be killed and started again.

Two API nodes, two workers, Celery with its beat and a Redis that keeps nothing, on one machine. The
model is a tiny one with random weights in fp32: real streams of a real engine, quick to load again.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from kernels.cpu.build import NATIVE
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import KERNELS, built
from tests.seeding import seed
from tests.services import free_port, redis_binaries

MODEL = "chaos/tiny"
CONTEXT_LENGTH = 4096
VOCAB_SIZE = 49_152
PEPPER = "a pepper for chaos"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WORKERS = ("worker", "worker-2")
NODES = ("api", "api-2")
START_S = 120.0


def save_model(directory: Path, default_model_directory: Path) -> None:
    """A tiny checkpoint that speaks with the default model's tokenizer."""
    save_tiny(
        "LlamaConfig",
        directory,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_LENGTH,
        num_hidden_layers=2,
    )
    for name in TOKENIZER_FILES:
        shutil.copyfile(default_model_directory / name, directory / name)


async def populate(
    database_url: str,
    model_directory: Path,
    *,
    price_of_input: int = 10**8,
    price_of_output: int = 10**9,
) -> str:
    """Host the model, sign a customer up; returns the key. Nano-dollars per million tokens."""
    return await seed(
        database_url,
        pepper=PEPPER,
        model=MODEL,
        directory=model_directory,
        context_length=CONTEXT_LENGTH,
        prices=(price_of_input, price_of_input // 10, price_of_output),
    )


@dataclass(slots=True)
class Cluster:
    """What runs, by name."""

    var: Path
    database_url: str
    model_directory: Path
    more_environment: dict[str, str] = field(default_factory=dict)
    redis_port: int = field(default_factory=free_port)
    node_ports: dict[str, int] = field(default_factory=lambda: {n: free_port() for n in NODES})
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    @property
    def redis_url(self) -> str:
        """Where everybody meets."""
        return f"redis://127.0.0.1:{self.redis_port}/0"

    @property
    def names(self) -> list[str]:
        """Every process."""
        return ["redis", "celery", *WORKERS, *NODES]

    def origin(self, node: str) -> str:
        """The address of an API node."""
        return f"http://127.0.0.1:{self.node_ports[node]}"

    def start(self, name: str) -> None:
        """Start a process that does not run."""
        with (self.var / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._command(name),
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """kill -9 of a process and its children."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)

    def wipe_redis(self) -> None:
        """Redis forgets everything without a restart."""
        with redis.Redis(port=self.redis_port) as client:
            client.flushall()

    def ended(self) -> list[str]:
        """Processes that ended although nobody killed them."""
        return [name for name, one in self.processes.items() if one.poll() is not None]

    def _command(self, name: str) -> list[str]:
        python = sys.executable
        if name == "redis":
            binary = next(iter(redis_binaries().values()))
            command = [binary, "--port", str(self.redis_port), "--bind", "127.0.0.1"]
            return [*command, "--save", "", "--appendonly", "no", "--dir", str(self.var)]
        if name == "celery":
            command = [python, "-m", "celery", "-A", "billing.celery_app", "worker", "-B"]
            return [*command, "--concurrency", "1", "--without-gossip", "--without-mingle"]
        if name in WORKERS:
            command = [python, "-m", "engine.worker", "--model", MODEL, "--worker", name]
            return [*command, "--path", str(self.model_directory), "--revision", "chaos"]
        command = [python, "-m", "uvicorn", "infra.asgi:create_application", "--factory"]
        command += ["--port", str(self.node_ports[name]), "--log-level", "warning"]
        return [*command, "--no-access-log"]

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "NCOMPASS_VAR": str(self.var),
            "NCOMPASS_DATABASE_URL": self.database_url,
            "NCOMPASS_REDIS_URL": self.redis_url,
            "NCOMPASS_ACCOUNTS_API_KEY_PEPPERS": json.dumps({"1": PEPPER}),
            "NCOMPASS_WEB_COOKIE_SECRET": "a cookie secret for chaos, long enough",
            # So small that every answer lives through several extensions.
            "NCOMPASS_BILLING_SLICE_TOKENS": "16",
            "NCOMPASS_API_CREDIT_PAUSE_S": "2",
            "NCOMPASS_BILLING_GATEWAY_LEASE_S": "4",
            "NCOMPASS_BILLING_GATEWAY_RENEW_EVERY_S": "1",
            "NCOMPASS_BILLING_SWEEP_EVERY_S": "1",
            "NCOMPASS_BROKER_LEASE_MS": "2000",
            "NCOMPASS_BROKER_NODE_MS": "2000",
            # The faults here are far more frequent than any request could be poisonous.
            "NCOMPASS_BROKER_MAX_ATTEMPTS": "100",
            "NCOMPASS_ENGINE_RENEW_S": "0.5",
            "NCOMPASS_ENGINE_DTYPE": "fp32",
            "NCOMPASS_ENGINE_NUM_THREADS": "1",
            "NCOMPASS_ENGINE_KV_CACHE_MIB": "64",
            "NCOMPASS_ENGINE_KERNEL_CACHE": str(KERNELS),
            "HF_HUB_OFFLINE": "1",
            **self.more_environment,
        }


@contextmanager
def running_cluster(
    var: Path,
    database_url: str,
    model_directory: Path,
    more_environment: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    """Everything started and nothing awaited; at the end everything is killed."""
    cluster = Cluster(var, database_url, model_directory, more_environment or {})
    try:
        built(NATIVE)
        cluster.start("redis")
        time.sleep(0.3)
        for name in cluster.names[1:]:
            cluster.start(name)
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.kill(name)
