"""The Lua scripts beside this file, ready to be called by their hash.

Each is `prelude.lua` followed by its own file. `EVALSHA` sends 40 bytes instead of the source; a
Redis that does not know the hash (restarted, wiped, failed over) answers NOSCRIPT, and the caller
loads the source and repeats the call.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

Argument = str | bytes | int | float

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Script:
    """One Lua script and the hash that Redis knows it by."""

    name: str
    source: str
    sha: str


@dataclass(frozen=True, slots=True)
class Call:
    """One script, run on the keys of one model."""

    script: Script
    prefix: str
    arguments: tuple[Argument, ...]

    @property
    def command(self) -> tuple[Argument, ...]:
        """The Redis command."""
        return ("EVALSHA", self.script.sha, 1, self.prefix, *self.arguments)


def _script(name: str, *shared: str) -> Script:
    names = ("prelude", *shared, name)
    source = "\n".join((DIRECTORY / f"{part}.lua").read_text() for part in names)
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


# of the API node
SUBMIT = _script("submit")
EXTEND = _script("extend")
CANCEL = _script("cancel")
END_CHOICE = _script("end_choice")
ANNOUNCE = _script("announce")
LEAVE = _script("leave")
LOOK = _script("look")
WORKERS = _script("workers")
TELL = _script("tell")

# of the worker
TAKE = _script("take")
PUBLISH = _script("publish")
RENEW = _script("renew")
RECLAIM = _script("reclaim")
CHARGE = _script("charge")
FINISH = _script("finish")
GIVE_BACK = _script("give_back", "lose")
CONTROL = _script("control")
HEARTBEAT = _script("heartbeat")
DEAD_NODES = _script("dead_nodes")

# of both
SWEEP = _script("sweep", "lose")

SWEEP_PAUSE_MS = 250
"""Sweeps closer together than this, by whomever, do nothing."""
