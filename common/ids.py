"""Identifiers: a readable prefix, then 26 characters that sort by creation time.

Source: the ULID layout (48 bits of milliseconds, 80 random bits, Crockford base 32).
"""

import os
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
PAIRS = [first + second for first in ALPHABET for second in ALPHABET]


def new_id(prefix: str) -> str:
    """A new identifier such as `req_01jd3k…`; unguessable and increasing per millisecond."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    # Two characters at a time: half of the steps, and there are several ids to a request.
    pairs = [PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)]
    return prefix + "_" + "".join(pairs)
