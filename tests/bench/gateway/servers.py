"""What is compared: ours on PostgreSQL, LiteLLM's proxy, Portkey's gateway, and no gateway at all.

The process under test has one core for itself; this process, and everything that it starts beside,
shares the others.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from pydantic import SecretStr

from infra.local import preflight, secret_store
from infra.local.platform_parts import api_part
from infra.local.wiring import Wiring
from infra.settings import InfraSettings
from migrations.upgrade import upgrade
from tests.bench.gateway.cells import TOKENS_PER_S, Served
from tests.bench.gateway.client import Target
from tests.seeding import seed
from tests.services import free_port, redis_binaries, running_postgresql, running_redis

ROOT = Path(__file__).parents[3]
MODEL = "bench/null"
CONTEXT_LENGTH = 1_000_000
START_S = 120.0
LITELLM_KEY = "sk-bench"
LITELLM = "litellm[proxy]==1.106.12"
"""1.110.2 asks for a package that the index does not have."""
PORTKEY = "@portkey-ai/gateway@1.15.2"
PORTKEY_PACKAGE = {"private": True, "overrides": {"@hono/node-server": "1.14.1"}}
"""With a later one it answers every stream with 500 (Portkey-AI/gateway#1389)."""


class NoAnswer(RuntimeError):
    """A server that was started answers no request; what it says is in the message."""


def split_cores() -> int:
    """Keep all cores but one to this process and its children; the core that is left."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the gateway's benchmark needs two cores")
    os.sched_setaffinity(0, set(cores[1:]))
    return cores[0]


@contextmanager
def process(
    command: Sequence[str],
    log: Path,
    *,
    core: int | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    directory: Path = ROOT,
) -> Iterator[int]:
    """Run `command`, on one core if it is named; yields its pid and ends it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pinned = ["taskset", "-c", str(core), *command] if core is not None else list(command)
    with log.open("wb") as output:
        running = subprocess.Popen(
            pinned,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            cwd=directory,
            start_new_session=True,
        )
    try:
        yield running.pid
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(timeout=10)


@contextmanager
def null_server(directory: Path, logs: Path) -> Iterator[Served]:
    """The engine that speaks OpenAI's API, without any gateway."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.gateway.null_server"]
    command += [str(port), str(directory), str(TOKENS_PER_S)]
    with process(command, logs / "null-server.log") as pid:
        target = Target(f"http://127.0.0.1:{port}", "null", {"authorization": "Bearer none"})
        _wait_for(target, logs / "null-server.log")
        yield Served("no gateway", target, pid)


@contextmanager
def ours(core: int, directory: Path, logs: Path) -> Iterator[Served]:
    """The API process of `make run`, with PostgreSQL, Redis and the null engine beside it."""
    settings = InfraSettings(NCOMPASS_PORT=free_port(), NCOMPASS_VAR=logs / "state")
    settings.var.mkdir(parents=True, exist_ok=True)
    kept = secret_store.load_or_make(settings.var)
    with running_postgresql() as database, running_redis(_redis()) as redis_url:
        upgrade(database)
        key = asyncio.run(
            seed(
                database,
                pepper=kept.api_key_pepper,
                model=MODEL,
                directory=directory,
                context_length=CONTEXT_LENGTH,
                prices=(10**6, 10**5, 10**6),
            )
        )
        named = settings.model_copy(update={"database_url": SecretStr(database)})
        wiring = Wiring(named, kept, redis_url, metrics_port=free_port())
        listener = preflight.listen(settings)
        spec = api_part(wiring, 0, listener.fileno())
        engine = [sys.executable, "-m", "tests.bench.gateway.null_engine", redis_url, MODEL]
        engine += [str(directory), str(TOKENS_PER_S)]
        with (
            process(engine, logs / "null-engine.log"),
            process(
                spec.command,
                logs / "api.log",
                core=core,
                environment=spec.environment,
                pass_fds=spec.pass_fds,
            ) as pid,
        ):
            listener.close()
            target = Target(wiring.origin, MODEL, {"authorization": f"Bearer {key}"})
            _wait_for(target, logs / "api.log")
            yield Served("nCompass", target, pid)


@contextmanager
def litellm(core: int, upstream: Served, peers: Path, logs: Path) -> Iterator[Served]:
    """LiteLLM's proxy with a master key and without a database."""
    environment = peers / "litellm"
    if not (environment / "bin" / "litellm").exists():
        print(f"{environment}: installing {LITELLM}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", LITELLM]
        subprocess.run(pip, check=True)
    parameters = {
        "model": "openai/null",
        "api_base": f"{upstream.target.origin}/v1",
        "api_key": "none",
    }
    configuration = {
        "model_list": [{"model_name": "null", "litellm_params": parameters}],
        "general_settings": {"master_key": LITELLM_KEY},
        "litellm_settings": {"telemetry": False},
    }
    written = logs / "litellm.yaml"
    written.write_text(json.dumps(configuration))  # YAML reads JSON
    port = free_port()
    command = [str(environment / "bin" / "litellm"), "--config", str(written)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    log = logs / "litellm.log"
    settings = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    with process(command, log, core=core, environment=settings) as pid:
        key = {"authorization": f"Bearer {LITELLM_KEY}"}
        target = Target(f"http://127.0.0.1:{port}", "null", key)
        _wait_for(target, log)
        yield Served("LiteLLM", target, pid)


@contextmanager
def portkey(core: int, upstream: Served, peers: Path, logs: Path) -> Iterator[Served]:
    """Portkey's gateway, which knows no keys and no money."""
    directory = peers / "portkey"
    package = directory / "node_modules" / "@portkey-ai" / "gateway"
    stamp, wanted = directory / "packages.json", json.dumps([PORTKEY, PORTKEY_PACKAGE])
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"{directory}: installing {PORTKEY}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "package.json").write_text(json.dumps(PORTKEY_PACKAGE))
        npm = ["npm", "install", "--no-audit", "--no-fund", PORTKEY]
        subprocess.run(npm, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        stamp.write_text(wanted)
    port = free_port()
    command = ["node", str(package / "build" / "start-server.js"), f"--port={port}", "--headless"]
    log = logs / "portkey.log"
    with process(command, log, core=core, directory=directory) as pid:
        headers = {
            "authorization": "Bearer none",
            "x-portkey-provider": "openai",
            "x-portkey-custom-host": f"{upstream.target.origin}/v1",
        }
        target = Target(f"http://127.0.0.1:{port}", "null", headers)
        _wait_for(target, log)
        yield Served("Portkey", target, pid)


Peer = Callable[[int, Served, Path, Path], object]


def make_logs() -> Path:
    """A folder for what the processes say."""
    return Path(tempfile.mkdtemp(prefix="nc-gateway-"))


def _redis() -> str:
    return next(iter(redis_binaries().values()))


def _wait_for(target: Target, log: Path, patience_s: float = START_S) -> None:
    """Until a whole request and a stream are answered. Raises NoAnswer."""
    deadline = time.monotonic() + patience_s
    told = "nothing"
    while time.monotonic() < deadline:
        told = next(
            filter(None, (_refusal(target, is_streamed=kind) for kind in (False, True))), ""
        )
        if not told:
            return
        time.sleep(0.3)
    raise NoAnswer(f"{log.name}: {told[-500:]}\n{log.read_text()[-2_000:]}")


def _refusal(target: Target, *, is_streamed: bool) -> str:
    """What a request is answered instead of tokens; empty where it is served."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    url, asked = f"{target.origin}{target.path}", body | {"stream": is_streamed}
    try:
        response = httpx.post(url, json=asked, headers=target.headers, timeout=10)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if response.status_code == 200 else f"{response.status_code} {response.text}"
