"""Scripts of many tasks over one connection: whatever has arrived shares the next round trip.

A client per task would open a connection per waiting request. Here thousands of tasks use one, and
under load a round trip carries hundreds of scripts (24 µs each instead of 63, measured). Nothing
waits for others to arrive.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from common.patience import Patience
from engine.broker.scripts import Argument, Call, Script
from engine.broker.settings import BrokerSettings
from engine.broker.wire import Wire
from engine.errors import ModelUnavailable

UNREACHABLE = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError)
"""What may pass if one waits: a restart, a failover, a network that stutters."""

FIRST_DELAY_S = 0.05
LAST_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Pending:
    call: Call
    answer: "asyncio.Future[Any]"


class Commands:
    """Runs scripts in the order in which they were asked for, many to a round trip."""

    def __init__(self, redis: Redis, settings: BrokerSettings) -> None:
        self._wire = Wire(redis)
        self._settings = settings
        self._patience = Patience(settings.patience_s)
        self._pending: deque[_Pending] = deque()
        self._arrived = asyncio.Event()

    def call(self, script: Script, prefix: str, *arguments: Argument) -> "asyncio.Future[Any]":
        """The script's answer, in time.

        Raises ModelUnavailable (here or through the future) where Redis does not answer within
        `patience_s`, is out of memory, or too many commands wait for it already.
        """
        if len(self._pending) >= self._settings.commands_limit:
            raise ModelUnavailable("the queue is overloaded", num_waiting=len(self._pending))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(Call(script, prefix, arguments), answer))
        self._arrived.set()
        return answer

    async def run(self) -> None:
        """Serve calls for ever; one task does this."""
        try:
            while True:
                await self._arrived.wait()
                while self._pending:
                    limit = min(len(self._pending), self._settings.command_batch)
                    await self._serve([self._pending.popleft() for _ in range(limit)])
                self._arrived.clear()
        finally:
            self._fail(list(self._pending), ModelUnavailable("the gateway is stopping"))
            self._pending.clear()
            await self._wire.close()

    async def _serve(self, batch: list[_Pending]) -> None:
        """One round trip, repeated until Redis answers or patience ends: every script may."""
        try:
            with self._patience:
                answers = await self._execute_patiently([pending.call for pending in batch])
        except TimeoutError:
            self._fail(batch, ModelUnavailable("the queue does not answer"))
            return
        except asyncio.CancelledError:
            self._fail(batch, ModelUnavailable("the gateway is stopping"))
            raise
        for pending, answer in zip(batch, answers, strict=True):
            if pending.answer.done():
                continue
            if _is_out_of_memory(answer):
                pending.answer.set_exception(ModelUnavailable("the queue is out of memory"))
            elif isinstance(answer, Exception):
                pending.answer.set_exception(answer)
            else:
                pending.answer.set_result(answer)

    async def _execute_patiently(self, calls: Sequence[Call]) -> list[Any]:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return await self._execute(calls)
            except UNREACHABLE:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _execute(self, calls: Sequence[Call]) -> list[Any]:
        answers = await self._round_trip([call.command for call in calls])
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            sources = {calls[i].script.source for i in unknown}
            await self._round_trip([("SCRIPT LOAD", source) for source in sorted(sources)])
            repeated = await self._round_trip([calls[i].command for i in unknown])
            for i, answer in zip(unknown, repeated, strict=True):
                answers[i] = answer
        return answers

    async def _round_trip(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        answers = await self._wire.round_trip(commands)
        for answer in answers:
            if isinstance(answer, UNREACHABLE):
                raise answer
        return answers

    @staticmethod
    def _fail(batch: Sequence[_Pending], error: Exception) -> None:
        for pending in batch:
            if not pending.answer.done():
                pending.answer.set_exception(error)


def _is_out_of_memory(answer: Any) -> bool:
    # NOTE: Redis 6 wraps the error of a command in an error of the script.
    if isinstance(answer, OutOfMemoryError):
        return True
    return isinstance(answer, ResponseError) and "OOM command not allowed" in str(answer)
