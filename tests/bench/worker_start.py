"""How long a worker takes from its start until it serves a model that it has served before."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.services import redis_binaries, running_redis

TIMEOUT_S = 120
NUM_STARTS = 3
"""Measured, after one that fills the caches; the median counts."""
LOADED = b"model loaded"
"""The line of its log with which a worker begins to take requests."""


def worker_start_s(model: Path, settings: Mapping[str, str]) -> float:
    """Median seconds from the process's start; `settings` are its environment variables."""
    with (
        running_redis(next(iter(redis_binaries().values()))) as redis_url,
        tempfile.TemporaryDirectory(prefix="nc-start-") as cache,
    ):
        environment = os.environ | dict(settings)
        environment["NCOMPASS_REDIS_URL"] = redis_url
        environment["NCOMPASS_ENGINE_CALIBRATION_CACHE"] = cache
        seconds = [_start_s(model, environment) for _ in range(NUM_STARTS + 1)][1:]
    return sorted(seconds)[len(seconds) // 2]


def _start_s(model: Path, environment: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "engine.worker", "--model", "start", "--path", str(model)]
    began_s = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if LOADED in line:
                return time.monotonic() - began_s
        raise SystemExit(b"".join(said).decode())
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
