"""Wall-clock time as integers, injectable so that tests can move it."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], int]
"""Returns UTC microseconds since the epoch."""

MICROSECONDS_PER_SECOND = 1_000_000


def utc_now_us() -> int:
    """UTC microseconds since the epoch, from this machine's clock."""
    return time.time_ns() // 1_000


def to_datetime(timestamp_us: int) -> datetime:
    """An aware UTC datetime for `timestamp_us` (microseconds since the epoch)."""
    return datetime.fromtimestamp(timestamp_us / MICROSECONDS_PER_SECOND, tz=UTC)
