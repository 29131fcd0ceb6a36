"""Text that is on the wire in the turn of the loop that brought its token.

Most frames of most streams add text to an answer that flows: nothing is to be decided, and nobody to
be waited for. They pass here straight from the broker's reader to the connection. Waking the task of
the request for each, only for it to wait again, cost as much as all that it does with a frame.
"""

from collections.abc import Sequence

from api.authorization import Authorization
from api.choices import Choice
from api.frames import Frames
from api.stopwatch import Stopwatch
from api.streaming import Answer
from engine.messages import TokenFrame


class Express:
    """Takes the ordinary frames of one request; its task is left with all others."""

    __slots__ = ("_answer", "_authorization", "_choices", "_frames", "_stopwatch")

    def __init__(
        self,
        choices: Sequence[Choice],
        stopwatch: Stopwatch,
        authorization: Authorization,
        frames: Frames,
        answer: Answer,
    ) -> None:
        self._choices = choices
        self._stopwatch = stopwatch
        self._authorization = authorization
        self._frames = frames
        self._answer = answer

    def take(self, frame: TokenFrame) -> bool:
        """Show what `frame` adds, while the request's task waits for it; False leaves it to that."""
        choice = self._choices[frame.choice]
        is_ordinary = (
            frame.is_plain
            and choice.is_plain
            and self._stopwatch.has_begun
            and self._authorization.is_steady
            and self._answer.is_ready
        )
        if not is_ordinary:
            return False
        self._frames.note_taken()
        self._stopwatch.note(frame)
        self._authorization.note(frame)
        if (piece := choice.accept(frame)) is not None:
            self._answer.add_at_once(piece)
        return True
