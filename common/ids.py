"""Identifiers: a readable prefix, then 26 characters that sort by creation time.

Source: the ULID layout (48 bits of milliseconds, 80 random bits, Crockford base 32).
"""

import secrets
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """A new identifier such as `req_01jd3k…`; unguessable and increasing per millisecond."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return prefix + "_" + "".join(ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))
