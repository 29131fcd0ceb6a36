"""What a caller is told while its answer waits for credit, and when it ends for want of it."""

from dataclasses import dataclass
from typing import Any

from common.errors import PlatformError


@dataclass(frozen=True, slots=True)
class Pause:
    """The answer stands still, and keeps its place for so long."""

    code: str
    message: str
    ends_in_s: int
    is_new: bool
    """Not told yet."""

    def as_json(self) -> dict[str, Any]:
        """The `paused` object of an event."""
        return {"code": self.code, "message": self.message, "ends_in_s": self.ends_in_s}


@dataclass(frozen=True, slots=True)
class Cut:
    """Why an answer ended before its limit although nothing stopped it."""

    code: str
    message: str

    def as_json(self) -> dict[str, str]:
        """The `finish_details` object of a choice."""
        return {"code": self.code, "message": self.message}


class CutShort(PlatformError):
    """The answer ends where its authorized tokens end. Told by its finish reason, never as an error."""

    code = "cut_short"

    def __init__(self, cut: Cut) -> None:
        super().__init__(cut.message)
        self.cut = cut
