"""How each part of the platform is started on one machine."""

import os
import sys
from pathlib import Path

from infra.local.default_model import DEFAULT_MODEL
from infra.local.parts import PartSpec
from infra.local.redis_server import RedisBinary, configuration
from infra.local.wiring import Wiring

GRACE_S = 10.0
"""Beyond the drain, before a part is killed."""
MODEL_REFUSED = 3
"""`engine.worker` ends so when its model cannot be hosted here (named there; it imports torch)."""


def redis_part(binary: RedisBinary, wiring: Wiring, port: int) -> PartSpec:
    """The embedded Redis; its password goes through standard input."""
    return PartSpec(
        name="redis",
        command=[binary.path, "-"],
        environment={},
        stop_timeout_s=GRACE_S,
        stdin=configuration(port, wiring.secrets.redis_password, wiring.var),
    )


def api_part(wiring: Wiring, index: int, listener_fd: int) -> PartSpec:
    """One uvicorn process on the supervisor's socket."""
    environment = wiring.environment()
    environment["NCOMPASS_METRICS_PORT"] = str(wiring.metrics_port if index == 0 else 0)
    drain_s = int(wiring.settings.drain_timeout_s)
    return PartSpec(
        name=numbered("api", index),
        command=[
            *(sys.executable, "-m", "infra.api_server"),
            *("--fd", str(listener_fd), "--drain-s", str(drain_s)),
        ],
        environment=environment,
        stop_timeout_s=drain_s + GRACE_S,
        pass_fds=(listener_fd,),
    )


def celery_part(wiring: Wiring) -> PartSpec:
    """One Celery worker with its beat."""
    return PartSpec(
        name="celery",
        command=[
            *(sys.executable, "-m", "celery", "-A", "billing.celery_app", "worker", "-B"),
            *("--concurrency", "1", "--loglevel", "INFO", "--without-gossip", "--without-mingle"),
        ],
        environment=wiring.environment(),
        stop_timeout_s=wiring.settings.drain_timeout_s,
    )


def worker_part(wiring: Wiring, name: str, model: str, path: Path, revision: str) -> PartSpec:
    """One engine replica of one model. A model that cannot be hosted must not stop the others."""
    environment = wiring.environment()
    if wiring.settings.workers > 1:
        # Replicas share the cores: two teams on the same ones would wait for each other.
        threads = max(1, (os.cpu_count() or 1) // wiring.settings.workers)
        environment.setdefault("NCOMPASS_ENGINE_NUM_THREADS", str(threads))
    return PartSpec(
        name=name,
        command=[
            *(sys.executable, "-m", "engine.worker", "--model", model),
            *("--path", str(path), "--revision", revision, "--worker", name),
        ],
        # Activations on huge pages: fewer faults and TLB misses (prefill 4 % faster when measured).
        environment=environment | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        stop_timeout_s=wiring.settings.drain_timeout_s + GRACE_S,
        is_essential=model == DEFAULT_MODEL,
        final_statuses=frozenset({MODEL_REFUSED}),
    )


def numbered(name: str, index: int) -> str:
    """`api`, `api-2`, `api-3`, …"""
    return name if index == 0 else f"{name}-{index + 1}"
