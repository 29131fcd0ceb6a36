"""The secrets of one machine, made once and kept in `var/secrets.json` (0600).

The API-key pepper signs every key of this database: losing the file means that every key must be
issued again. Nothing here is ever logged or passed on a command line.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from infra.errors import SetUpFailed

SECRETS_FILE = "secrets.json"


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the processes of one machine share, and the two accounts that come with it."""

    redis_password: str
    api_key_pepper: str
    cookie_secret: str
    demo_password: str
    operator_password: str
    demo_api_key: str = ""
    operator_api_key: str = ""

    def __repr__(self) -> str:
        return "Secrets(…)"


def load_or_make(var: Path) -> Secrets:
    """The secrets of `var`, with whatever is missing made and stored. Raises SetUpFailed."""
    path = var / SECRETS_FILE
    try:
        stored = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as fault:
        raise SetUpFailed(
            f"{path} cannot be read ({fault}); restore it, or remove it: every API key is then new"
        ) from fault
    known = {field.name for field in fields(Secrets)}
    made = {
        name: secrets.token_urlsafe(32)
        for name in ("redis_password", "api_key_pepper", "cookie_secret")
    } | {name: secrets.token_urlsafe(12) for name in ("demo_password", "operator_password")}
    result = Secrets(**(made | {name: stored[name] for name in known & stored.keys()}))
    if asdict(result) != stored:
        store(var, result)
    return result


def with_keys(var: Path, kept: Secrets, *, demo: str, operator: str) -> Secrets:
    """`kept` with the two accounts' API keys, stored."""
    result = replace(kept, demo_api_key=demo, operator_api_key=operator)
    if result != kept:
        store(var, result)
    return result


def store(var: Path, kept: Secrets) -> None:
    """Write the file by one rename, readable by its owner only."""
    write_private(var / SECRETS_FILE, json.dumps(asdict(kept), indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step, mode 0600 from its first byte on."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
