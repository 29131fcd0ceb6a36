"""`make clean`: remove the state directory, unless it is in use or is not ours.

Standard library only: it must work when `.venv` is gone.
"""

import shutil
import sys
from pathlib import Path

from infra.errors import InfraError
from infra.local.instance_lock import LOCK_FILE, instance_lock


def clean(var: Path) -> str:
    """Remove `var`; returns what to tell. Raises AlreadyRunning while an instance uses it."""
    if not var.exists():
        return f"{var} is not there: nothing to remove"
    if not (var / LOCK_FILE).exists():
        return f"{var} was not made by nCompass (no {LOCK_FILE} in it): left alone"
    with instance_lock(var):
        shutil.rmtree(var)
    return f"removed {var}"


if __name__ == "__main__":
    try:
        sys.stdout.write(clean(Path(sys.argv[1])) + "\n")
    except InfraError as refusal:
        sys.exit(refusal.message)
