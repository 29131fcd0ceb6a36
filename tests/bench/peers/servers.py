"""What is compared: ours with the whole platform, and vLLM, each in processes of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine.simulator.policies import PEER_WINDOW
from tests.bench.peers.environment import ENVIRONMENT, vllm_preloads
from tests.bench.platform import run_platform
from tests.services import free_port

START_TIMEOUT_S = 600
"""vLLM compiles the model when it starts for the first time: 70 to 240 s."""
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Server:
    """A running engine behind HTTP."""

    origin: str
    """`http://127.0.0.1:8000`: `/v1/completions` is under it."""
    api_key: str
    model: str
    pid: int
    """The root of its processes."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in one configuration."""

    name: str
    """In file names and rows."""
    title: str
    precision: str
    start: Callable[[], AbstractContextManager[Server]]


OUR_SETTINGS: Mapping[str, tuple[str, str, dict[str, str]]] = {
    "ours": ("nCompass, bf16", "bf16", {"dtype": "bf16"}),
    "ours_int8": ("nCompass, int8", "int8", {"dtype": "bf16", "quantization": "int8"}),
    "ours_as_vllm": (
        "nCompass, vLLM's policy",
        "bf16",
        {"dtype": "bf16", "policy": "vllm", "take_window": str(PEER_WINDOW)},
    ),
}
"""By name: title, precision, settings of the engine."""


def our_engines() -> list[Contestant]:
    """Ours in every configuration."""
    return [
        _ours(name, title, precision, settings)
        for name, (title, precision, settings) in OUR_SETTINGS.items()
    ]


def _ours(name: str, title: str, precision: str, settings: Mapping[str, str]) -> Contestant:
    """The whole platform: API, broker, ledger, one worker."""
    environment = {f"NCOMPASS_ENGINE_{key.upper()}": value for key, value in settings.items()}

    @contextmanager
    def start() -> Iterator[Server]:
        with run_platform(environment) as platform:
            ready = platform.ready
            origin = ready["base_url"].removesuffix("/v1")
            yield Server(origin, ready["api_key"], ready["model"], ready["pids"]["supervisor"])

    return Contestant(name, title, precision, start)


@dataclass(frozen=True, slots=True)
class Vllm:
    """An installed vLLM; `served` is the model's public name."""

    environment: Path
    served: str
    logs: Path

    def contestant(
        self, name: str, title: str, precision: str, model: Path, *, is_tuned: bool
    ) -> Contestant:
        """`vllm serve` of the checkpoint `model`: activations in bf16, 4 GiB of KV cache.

        Tuned: computes on every core, and preloads what its documentation asks for. Otherwise its
        defaults, which leave one core to the rest of the machine.
        """
        settings = ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "4"}
        if is_tuned:
            settings |= {
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_OMP_THREADS_BIND": cores(),
                "LD_PRELOAD": ":".join(str(path) for path in vllm_preloads(self.environment)),
            }
        command = [str(self.environment / "bin" / "vllm"), "serve", str(model)]
        command += ["--served-model-name", self.served, "--dtype", "bfloat16"]
        command += ["--max-model-len", str(MAX_MODEL_LEN)]

        @contextmanager
        def start() -> Iterator[Server]:
            with served_by(command, settings, self.logs / f"{name}.log") as (origin, pid):
                yield Server(origin, "none", self.served, pid)

        return Contestant(name, title, precision, start)


def cores() -> str:
    """The cores that this process may use, as vLLM's thread binding wants them: `0-1`."""
    allowed = sorted(os.sched_getaffinity(0))
    if allowed == list(range(allowed[0], allowed[-1] + 1)):
        return f"{allowed[0]}-{allowed[-1]}"
    return ",".join(str(core) for core in allowed)


@contextmanager
def served_by(
    command: list[str], settings: Mapping[str, str], log: Path
) -> Iterator[tuple[str, int]]:
    """Run a server on a free port until it is healthy; yields its origin and pid, and ends it."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | dict(settings),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        origin = f"http://127.0.0.1:{port}"
        _wait_until_healthy(origin, process, log)
        yield origin, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _wait_until_healthy(origin: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{origin}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{log.name}: it did not start\n{log.read_text()[-2000:]}")
        time.sleep(0.5)
