"""When the frames of one request came, and what the worker told of the time before and between."""

import time

from api.summary import Timings
from engine.messages import TokenFrame


class Stopwatch:
    """The durations of one request, noted frame by frame.

    The worker that gave the first token tells how long the request was queued and prefilled. When
    another worker went on later, only this process has seen the whole of the decoding.
    """

    def __init__(self, arrived_at_s: float) -> None:
        self.num_cached_tokens = 0
        """Prompt tokens that the first worker had in its cache."""
        self._arrived_at_s = arrived_at_s
        self._first_at_s: float | None = None
        self._last_at_s = 0.0
        self._first_attempt = 0
        self._told: Timings = Timings()
        self._num_drafts = 0
        self._num_accepted_drafts = 0

    @property
    def has_begun(self) -> bool:
        """Whether a frame has come at all."""
        return self._first_at_s is not None

    def note(self, frame: TokenFrame) -> None:
        """A frame has come."""
        self._last_at_s = time.monotonic()
        if self._first_at_s is None:
            self._first_at_s = self._last_at_s
            self._first_attempt = frame.attempt
            self.num_cached_tokens = frame.num_cached_tokens
        if frame.num_drafts:
            self._num_drafts += frame.num_drafts
            self._num_accepted_drafts += len(frame.token_ids) - 1
        timing = frame.timing
        if timing is None or frame.attempt != self._first_attempt:
            return
        self._told = Timings(
            queued_us=timing.queued_us,
            prefill_us=timing.prefill_us,
            decode_us=timing.decode_us if frame.finish_reason else None,
            behind_own_us=timing.behind_own_us,
            behind_others_us=timing.behind_others_us,
            tenants_active=timing.num_tenants,
        )

    def timings(self) -> Timings:
        """The worker's durations, and the time to first token as this process saw it."""
        if self._first_at_s is None:
            return Timings()
        told = self._told
        seen_decode_us = int((self._last_at_s - self._first_at_s) * 1e6)
        return Timings(
            ttft_us=int((self._first_at_s - self._arrived_at_s) * 1e6),
            queued_us=told.queued_us,
            prefill_us=told.prefill_us,
            decode_us=seen_decode_us if told.decode_us is None else told.decode_us,
            behind_own_us=told.behind_own_us,
            behind_others_us=told.behind_others_us,
            tenants_active=told.tenants_active,
            draft_tokens=self._num_drafts,
            accepted_draft_tokens=self._num_accepted_drafts,
        )
