"""Which models a worker hosts: one that its command line names, or a file that may change meanwhile.

The supervisor writes the file after every change of the catalogue (on a cluster: a mounted
configuration map); the worker itself has no SQL.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

logger = structlog.get_logger(__name__)


class Hosting(msgspec.Struct, frozen=True):
    """A model that a worker is to serve under its public `name`."""

    name: str
    path: str
    revision: str
    base: str = ""
    """The model that this is an adapter of; empty for a model of its own."""

    @property
    def directory(self) -> Path:
        """Where its checkpoint is."""
        return Path(self.path)


class FixedHostings:
    """What never changes."""

    def __init__(self, hostings: Sequence[Hosting]) -> None:
        self._hostings: list[Hosting] | None = list(hostings)

    def changed(self) -> list[Hosting] | None:
        """Everything at the first call, then None."""
        hostings, self._hostings = self._hostings, None
        return hostings


class HostingFile:
    """A JSON list of hostings, looked at again whenever the file is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def changed(self) -> list[Hosting] | None:
        """The hostings if they may have changed; None as long as they have not, or cannot be read."""
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen == self._seen:
                return None
            hostings = msgspec.json.decode(self._path.read_bytes(), type=list[Hosting])
        except (OSError, msgspec.MsgspecError) as fault:
            logger.warning("cannot read which models to host", path=str(self._path), why=str(fault))
            return None
        self._seen = seen
        return hostings


def write_hostings(path: Path, hostings: Sequence[Hosting]) -> None:
    """Replace the file in one step: a reader sees the old list or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(list(hostings)))
    partial.replace(path)
