"""Stop strings match on text, across the borders of tokens and chunks."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a growing text at the first stop string.

    Law: what `push` and `flush` have returned, joined, is the text up to the start of the match
    that completes first, and contains no stop string. Only an end of the text that could still
    become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def is_matched(self) -> bool:
        """Whether the text has ended at a stop string."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The part of the text that is safe to show now."""
        if self.is_matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            # The one that completes first, so that the result does not depend on the chunks.
            _, start, self.matched = min(matches)
            self._held = ""
            return text[:start]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0
