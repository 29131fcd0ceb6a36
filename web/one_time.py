"""Carries a new API key from the form that made it to the one page that shows it.

A key is shown after a redirect, so that Reload and Back never repeat the form. In between it is
split like a one-time pad: Redis holds `key XOR pad` under the hash of the browser's session, and
the browser holds the pad in a cookie that its scripts cannot read. Neither half says anything about
the key, the Redis half can be taken once, and both are gone after a minute.
"""

import hashlib
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode

from redis.asyncio import Redis
from redis.exceptions import RedisError

from web.errors import HandoverFailed

MAX_SECRET_BYTES = 512


class KeyHandover:
    """Puts and takes secrets that are shown once."""

    def __init__(self, redis: Redis, *, ttl_s: int) -> None:
        self._redis = redis
        self._ttl_s = ttl_s

    async def put(self, session_token: str, plaintext: str) -> str:
        """Leave `plaintext` for this browser session; returns the pad, for the browser's cookie.
        Raises HandoverFailed."""
        secret = plaintext.encode()
        assert len(secret) <= MAX_SECRET_BYTES
        pad = secrets.token_bytes(len(secret))
        try:
            await self._redis.set(_name(session_token), _xor(secret, pad), ex=self._ttl_s)
        except (RedisError, OSError) as error:
            raise HandoverFailed("The new key cannot be carried to its page now.") from error
        return urlsafe_b64encode(pad).decode()

    async def take(self, session_token: str, pad: str) -> str | None:
        """The secret that was left for this session, the first time only; None ever after.
        Raises HandoverFailed."""
        if len(pad) > 2 * MAX_SECRET_BYTES:
            return None
        try:
            masked = await self._redis.getdel(_name(session_token))
        except (RedisError, OSError) as error:
            raise HandoverFailed("The new key cannot be shown now.") from error
        try:
            decoded_pad = urlsafe_b64decode(pad)
        except ValueError:
            return None
        if not isinstance(masked, bytes) or len(masked) != len(decoded_pad):
            return None
        try:
            return _xor(masked, decoded_pad).decode("ascii")
        except UnicodeDecodeError:  # a pad of another secret
            return None


def _name(session_token: str) -> str:
    return f"nc:web:handover:{hashlib.sha256(session_token.encode()).hexdigest()}"


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
