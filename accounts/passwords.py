"""Passwords: argon2id in a bounded thread pool.

argon2id releases the GIL and takes 20 ms to 80 ms, so it may neither run on the event loop nor in
an unbounded pool, where a flood of logins would take every core from inference.
"""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor

from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher

from accounts.errors import WeakPassword
from accounts.settings import AccountsSettings

MIN_LENGTH = 10
MAX_LENGTH = 1_000


def require_strong(password: str, *, email: str) -> None:
    """Raise WeakPassword unless the password has a sane length and is not the address itself."""
    if len(password) < MIN_LENGTH:
        raise WeakPassword(f"The password needs at least {MIN_LENGTH} characters.")
    if len(password) > MAX_LENGTH:
        raise WeakPassword(f"The password may have at most {MAX_LENGTH} characters.")
    if password.casefold() == email.casefold() or len(set(password)) < 4:
        raise WeakPassword("This password is too easy to guess.")


class PasswordHasher:
    """Hashes and verifies passwords, at most `password_threads` at once. One per process."""

    def __init__(self, settings: AccountsSettings) -> None:
        self._argon2 = PasswordHash(
            (
                Argon2Hasher(
                    time_cost=settings.argon2_iterations,
                    memory_cost=settings.argon2_memory_kib,
                    parallelism=settings.argon2_parallelism,
                ),
            )
        )
        self._pool = ThreadPoolExecutor(settings.password_threads, thread_name_prefix="argon2")
        self._decoy = self._argon2.hash(secrets.token_urlsafe(16))

    async def hash(self, password: str) -> str:
        """An argon2id hash with its own salt and parameters inside."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._argon2.hash, password)

    async def verify(self, password: str, password_hash: str | None) -> bool:
        """Does the password fit? Without a hash it works as long as with one, then says no."""
        loop = asyncio.get_running_loop()
        is_right = await loop.run_in_executor(
            self._pool, self._argon2.verify, password, password_hash or self._decoy
        )
        return is_right and password_hash is not None

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
