"""The supervisor's end of the pipe to the guardian (`guardian.py`)."""

import contextlib
import subprocess
import sys
from pathlib import Path

from infra.errors import PartFailed


class Guard:
    """Tells the guardian which process groups must not outlive this process."""

    def __init__(self, ready_file: Path) -> None:
        script = Path(__file__).with_name("guardian.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(ready_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as fault:
            raise PartFailed(f"the guardian process cannot be started: {fault}") from fault

    @property
    def pid(self) -> int:
        """The guardian's process."""
        return self._process.pid

    def add(self, group: int) -> None:
        """`group` must end when this process does."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """`group` has ended; its number may soon be somebody else's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let the guardian go; it ends every group that is still there."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=10)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Somebody killed the guardian: the platform runs on, only without its safety net.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
