"""`var/ready.json`: how scripts find the running platform (DESIGN §8). It exists while all is ready."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import NotRunning
from infra.local.secret_store import write_private

READY_FILE = "ready.json"


@dataclass(frozen=True, slots=True)
class Ready:
    """Addresses, keys and processes of a running platform."""

    base_url: str
    api_key: str
    """The demo account's."""
    admin_api_key: str
    """The operator's."""
    model: str
    redis_url: str
    database_url: str
    metrics_url: str
    pids: dict[str, int]
    """By part: `supervisor`, `redis`, `api`, `celery`, `worker`; further ones are `worker-2`, …"""

    def __repr__(self) -> str:
        return f"Ready({self.base_url}, {self.model})"


def write(var: Path, ready: Ready) -> None:
    """Publish that the platform is ready (mode 0600: it holds two keys)."""
    write_private(var / READY_FILE, json.dumps(asdict(ready), indent=2) + "\n")


def remove(var: Path) -> None:
    """The platform is not, or no longer, ready."""
    (var / READY_FILE).unlink(missing_ok=True)


def read(var: Path) -> Ready:
    """The running platform of `var`; raises NotRunning."""
    try:
        return Ready(**json.loads((var / READY_FILE).read_text()))
    except FileNotFoundError:
        raise NotRunning(f"nothing is running on {var}; start it with: make run") from None
    except (OSError, ValueError, TypeError) as fault:
        raise NotRunning(f"{var / READY_FILE} cannot be read: {fault}") from fault
