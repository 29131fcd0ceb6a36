"""What the supervisor shows: one line a stage, with its time; plain text into a pipe."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Display:
    """Writes for people. Never shows a secret but the keys that its user asked for."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def say(self, line: str, style: str = "") -> None:
        """One line."""
        self.console.print(line, style=style, markup=False)

    def note(self, line: str) -> None:
        """Something that is good to know and asks for nothing."""
        self.say(f"  · {line}", "dim")

    def warn(self, line: str) -> None:
        """Something that may ask for somebody."""
        self.say(f"  ! {line}", "yellow")

    def stream(self, text: str) -> None:
        """A piece of an answer, as it comes."""
        self.console.file.write(text)
        self.console.file.flush()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Show that a stage runs, then how long it took; a failure shows as one."""
        started = time.monotonic()
        if sys.stdout.isatty():
            with self.console.status(title):
                yield
        else:
            yield
        self.console.print(
            f"  [green]✓[/] {title} [dim]{time.monotonic() - started:.1f} s[/]", markup=True
        )
