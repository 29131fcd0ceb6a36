"""Ends the platform's processes when the supervisor is gone, however it went.

The supervisor tells over a pipe which process groups it owns (`+123`, `-123`). When the pipe
closes, the supervisor is dead: a clean stop has by then taken back every group; after `kill -9`
the groups that are left get SIGTERM and, a little later, SIGKILL. Works wherever there are process
groups, and reaches the grandchildren (Celery's beat) that a parent-death signal does not.

Runs as a file of its own under `python -I -S`: 8 MB, and nothing to import.
"""

import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 3.0
POLL_S = 0.05


def is_alive(group: int) -> bool:
    """Whether any process of `group` is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(groups: set[int], number: int) -> None:
    """Send a signal to every group that is still there."""
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue


def main() -> None:
    """Follow the supervisor until it is gone, then clean up after it.

    Argument: the file that says that the platform is ready; it must not outlive the platform.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line[0] == "+" else groups.discard(group)
    if not groups:
        return
    Path(sys.argv[1]).unlink(missing_ok=True)
    end(groups, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while any(is_alive(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    end(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
