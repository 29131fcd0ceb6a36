"""One instance per state directory: an advisory lock that dies with its holder.

Standard library only: `make clean` uses it without an environment.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import AlreadyRunning

LOCK_FILE = "instance.lock"


@contextmanager
def instance_lock(var: Path) -> Iterator[None]:
    """Hold the lock of `var` (made if missing). Raises AlreadyRunning when another process does.

    The kernel releases it when the holder dies, however it dies, so a stale file locks nobody out.
    When `var` is made here nobody else may look into it: accounts, password hashes and logs are there.
    """
    var.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(var / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(
                f"another nCompass (process {holder}) is using {var}; stop it, or choose another"
                " directory and port: make run VAR=var-2 PORT=8001",
                pid=holder,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
