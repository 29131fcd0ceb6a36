"""How each part of the platform is started on one machine."""

import os
import sys

from infra.local.parts import PartSpec
from infra.local.redis_server import RedisBinary, configuration
from infra.local.wiring import Wiring

GRACE_S = 10.0
"""Beyond the drain, before a part is killed."""
WORKER_REFUSED = 3
"""`engine.worker` ends so when it can host nothing here (named there; it imports torch)."""
WORKERS_SHARE = 0.9
"""Of the free memory, for all workers together; of one it is the default of its own setting."""


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


def worker_part(wiring: Wiring, name: str) -> PartSpec:
    """One engine worker. It hosts every model of the file that the supervisor writes."""
    environment = wiring.environment()
    num_workers = wiring.settings.workers
    if num_workers > 1:
        # They share the cores and the memory: two teams on the same cores would wait for each other.
        threads = max(1, (os.cpu_count() or 1) // num_workers)
        environment.setdefault("NCOMPASS_ENGINE_NUM_THREADS", str(threads))
        environment.setdefault("NCOMPASS_ENGINE_MEMORY_SHARE", f"{WORKERS_SHARE / num_workers:.3f}")
    return PartSpec(
        name=name,
        command=[
            *(sys.executable, "-m", "engine.worker"),
            *("--models", str(wiring.hostings_file), "--worker", name),
        ],
        # Activations on huge pages: fewer faults and TLB misses (prefill 4 % faster when measured).
        environment=environment | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        stop_timeout_s=wiring.settings.drain_timeout_s + GRACE_S,
        final_statuses=frozenset({WORKER_REFUSED}),
    )


def numbered(name: str, index: int) -> str:
    """`api`, `api-2`, `api-3`, …"""
    return name if index == 0 else f"{name}-{index + 1}"
