"""How much output of a request is paid for: the fence, which moves ahead of its tokens.

A hold covers the prompt and one slice of output. When half of a slice has come, the next one is held;
the target is absolute, so that asking again is harmless. Where credit is short, what there is is held,
and then the request waits for more: its tokens come up to the fence, and there it pauses.
"""

import asyncio
import time
from collections.abc import Sequence
from math import inf

import structlog

from accounts.errors import InvalidKey, KeyExpired, KeyRevoked, OrganizationFrozen
from api.choices import Choice
from api.dependencies import Services
from api.placement import Order, Placement
from api.shortage import Cut, CutShort, Pause
from billing.errors import BudgetExceeded, InsufficientCredit, LedgerUnavailable
from billing.money import affordable_output, cost
from engine.errors import ModelUnavailable
from engine.messages import TokenFrame

log = structlog.get_logger()

RESUME_TOKENS = 16
"""Of each choice: for less, a paused request is not woken. Trickling credit would cost more
transactions than it brings tokens."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 16.0
NO_MORE = (InvalidKey, KeyRevoked, KeyExpired, OrganizationFrozen)
"""Waiting does not help: the answer ends at its fence."""


class Authorization:
    """The hold of one running request, and how it grows. `close` it when the request ends."""

    def __init__(
        self, services: Services, order: Order, placement: Placement, choices: Sequence[Choice]
    ) -> None:
        self.hold = placement.hold
        """As it was granted last."""
        self._services = services
        self._order = order
        self._stream = placement.stream
        self._choices = choices
        self._asking: asyncio.Task[None] | None = None
        self._ask_at = self._half_way_from(0)
        """Tokens of one choice at which the next slice is asked for."""
        self._shortage: InsufficientCredit | LedgerUnavailable | None = None
        """Why the request waits for more, once it does."""
        self._paused_at_s: float | None = None
        self._is_extended = False

    def note(self, frame: TokenFrame) -> None:
        """Tokens have come: ask for the next slice where half of this one is used."""
        self._resume()
        if frame.first_index + len(frame.token_ids) >= self._ask_at:
            self._ask_at = inf
            self._asking = self._services.running.start(self._extend())

    @property
    def is_steady(self) -> bool:
        """Whether no slice is being asked for, so that there is nothing to pause for."""
        return self._asking is None

    def pause(self) -> Pause | None:
        """How the request waits for credit; None when it does not.

        Raises CutShort when it has waited for long enough, or waiting is in vain; LedgerUnavailable
        when nobody knows how much credit there is; HoldFenced when the hold is another's by now.
        """
        if self._asking is None:
            return None
        failure = self._asking.exception() if self._asking.done() else None
        if (failure is None and self._shortage is None) or not self._is_used_up:
            return None
        if failure is not None:
            raise _ended_by(failure)
        assert self._shortage is not None
        now_s = time.monotonic()
        is_new = self._paused_at_s is None
        if self._paused_at_s is None:
            self._paused_at_s = now_s
            self._services.metrics.paused.inc()
        left_s = self._paused_at_s + self._services.settings.credit_pause_s - now_s
        if left_s <= 0:
            raise _ended_by(self._shortage)
        return Pause(self._shortage.code, self._shortage.message, round(left_s), is_new)

    async def repeat(self) -> None:
        """No token has come for a while: the worker may not have heard of the fence."""
        if self._is_extended:
            await self._tell_worker()

    def close(self) -> None:
        """Ask for nothing more. What is asked already is settled with the hold."""
        self._resume()
        if self._asking is not None:
            self._asking.cancel()

    @property
    def _fence(self) -> int:
        return self._stream.request.authorized_tokens

    @property
    def _is_used_up(self) -> bool:
        """Whether no token can come before the fence moves."""
        if self._fence >= self._order.max_tokens or self._stream.has_frames:
            return False
        emitted = self._stream.emitted_token_ids
        return all(len(emitted[choice.index]) >= self._fence for choice in self._open_choices)

    @property
    def _open_choices(self) -> list[Choice]:
        return [choice for choice in self._choices if choice.finish_reason is None]

    def _resume(self) -> None:
        if self._paused_at_s is not None:
            self._paused_at_s = None
            self._services.metrics.paused.dec()

    # asking for more

    async def _extend(self) -> None:
        """Hold the next slice or what fits of it; where nothing fits, wait until something does."""
        slice_tokens = self._services.billing_settings.slice_tokens
        wanted = min(self._fence + slice_tokens, self._order.max_tokens)
        least, retry_s = self._fence + 1, FIRST_RETRY_S
        while (shortage := await self._ask(wanted, least)) is not None:
            self._shortage = shortage
            least = min(self._fence + RESUME_TOKENS, wanted)
            if isinstance(shortage, InsufficientCredit) and not isinstance(
                shortage, BudgetExceeded
            ):
                required = self._amount(least) - self.hold.amount_nano_usd
                await self._services.credit_watch.wait(
                    self._order.principal.organization_id, required
                )
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._shortage = self._asking = None

    async def _ask(self, wanted: int, least: int) -> InsufficientCredit | LedgerUnavailable | None:
        """Hold up to `wanted` tokens of each choice, `least` at least; else why not."""
        outcome, shortage = "granted", await self._try(wanted)
        if isinstance(shortage, InsufficientCredit):
            fitting = min(wanted, self._fitting(shortage))
            if fitting >= least:
                outcome, shortage = "partly", await self._try(fitting)
        self._services.metrics.extensions.labels("refused" if shortage else outcome).inc()
        return shortage

    async def _try(self, fence: int) -> InsufficientCredit | LedgerUnavailable | None:
        hold = self.hold
        try:
            self.hold = await self._services.hold_writer.extend(
                hold.request_id, hold.epoch, self._total(fence), owner=self._order.owner
            )
        except (InsufficientCredit, LedgerUnavailable) as shortage:
            return shortage
        previous = self._fence
        self._stream.authorize(fence)
        self._ask_at = self._half_way_from(previous)
        self._is_extended = True
        await self._tell_worker()
        return None

    async def _tell_worker(self) -> None:
        try:
            await self._services.broker.extend(self._stream.request)
        except ModelUnavailable as error:
            # No token comes until the queue is back, and then this is said again.
            log.info("extension_not_told", request_id=self.hold.request_id, code=error.code)

    # counting

    def _half_way_from(self, previous: int) -> float:
        if self._fence >= self._order.max_tokens:
            return inf
        return self._fence - (self._fence - previous) // 2

    def _total(self, fence: int) -> int:
        """Output tokens over all choices: what the ended ones have used, and the fence of the rest."""
        return self._num_ended_tokens + len(self._open_choices) * fence

    @property
    def _num_ended_tokens(self) -> int:
        return sum(c.num_tokens for c in self._choices if c.finish_reason is not None)

    def _amount(self, fence: int) -> int:
        """Nano-dollars of a hold up to `fence`."""
        prompt = len(self._order.prompt_token_ids)
        output = self._total(fence)
        return cost(self._order.listing.price, uncached_input=prompt, cached_input=0, output=output)

    def _fitting(self, shortage: InsufficientCredit) -> int:
        """The fence that the credit covers, as of this refusal."""
        available = max(0, shortage.facts["available"])
        output = affordable_output(
            self._order.listing.price,
            input_tokens=len(self._order.prompt_token_ids),
            available=self.hold.amount_nano_usd + available,
        )
        assert output is not None, "output that is free is never refused"
        return (output - self._num_ended_tokens) // max(1, len(self._open_choices))


def _ended_by(error: BaseException) -> BaseException:
    if isinstance(error, (InsufficientCredit, *NO_MORE)):
        return CutShort(Cut(error.code, error.message))
    return error
