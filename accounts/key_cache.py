"""The API's view of keys: at most one second old, whatever Redis or the network does.

A hard time limit is the guarantee; no broadcast can be lost. Admission asks again inside its own
transaction (`billing.holds`), so a revoked key buys nothing even within that second.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from accounts import api_keys, key_format
from accounts.api_keys import KeyRing
from accounts.errors import AccountError
from accounts.principal import Principal
from common.clock import Clock, utc_now_us
from common.db import Sessions, read_only

TTL_S = 1.0
AHEAD_S = 0.6
"""An answer of this age is asked for again while it still holds, so that nobody waits for the next."""
MAX_ENTRIES = 20_000


@dataclass(frozen=True, slots=True)
class _Answer:
    principal: Principal | None
    error: AccountError | None
    asked_at_s: float


class KeyCache:
    """Answers `authenticate` from memory for one second; concurrent misses share one query."""

    def __init__(
        self,
        sessions: Sessions,
        key_ring: KeyRing,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Clock = utc_now_us,
    ) -> None:
        self._sessions = sessions
        self._key_ring = key_ring
        self._monotonic = monotonic
        self._clock = clock
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[_Answer]] = {}
        self._last_used: dict[str, int] = {}

    async def authenticate(self, plaintext: str) -> Principal:
        """Who holds this key; raises InvalidKey, KeyRevoked, KeyExpired."""
        key_format.prefix_of(plaintext)
        digest = hashlib.sha256(plaintext.encode()).digest()
        answer = self._answers.get(digest)
        age_s = TTL_S if answer is None else self._monotonic() - answer.asked_at_s
        if answer is None or age_s >= TTL_S:
            # NOTE: shielded, because the first caller may hang up while others wait for the answer.
            answer = await asyncio.shield(self._ask_once(digest, plaintext))
        elif age_s >= AHEAD_S:
            self._ask_once(digest, plaintext)
        if answer.error is not None:
            raise type(answer.error)(answer.error.message, **answer.error.facts)
        assert answer.principal is not None
        assert answer.principal.api_key_id is not None
        self._last_used[answer.principal.api_key_id] = self._clock()
        return answer.principal

    async def record_last_used(self) -> None:
        """Write the collected times of use; the API calls it about once a minute."""
        used, self._last_used = self._last_used, {}
        if used:
            async with self._sessions.begin() as session:
                await api_keys.record_last_used(session, used)

    def _ask_once(self, digest: bytes, plaintext: str) -> "asyncio.Task[_Answer]":
        task = self._asking.get(digest)
        if task is None:
            task = asyncio.create_task(self._ask(digest, plaintext))
            self._asking[digest] = task
            task.add_done_callback(lambda done: self._note_end(digest, done))
        return task

    def _note_end(self, digest: bytes, task: "asyncio.Task[_Answer]") -> None:
        del self._asking[digest]
        if not task.cancelled():
            task.exception()  # whoever waits gets it, too; where nobody does, the next one asks again

    async def _ask(self, digest: bytes, plaintext: str) -> _Answer:
        # The age counts from before the query: an answer read just before a revocation committed
        # must not live a full second from when it happened to arrive.
        asked_at_s = self._monotonic()
        principal, error = None, None
        async with read_only(self._sessions) as session:
            try:
                principal = await api_keys.authenticate(
                    session, plaintext, self._key_ring, clock=self._clock
                )
            except AccountError as refused:
                error = refused
        answer = _Answer(principal, error, asked_at_s)
        self._answers[digest] = answer
        self._answers.move_to_end(digest)
        while len(self._answers) > MAX_ENTRIES:
            self._answers.popitem(last=False)
        return answer
