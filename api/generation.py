"""The life of one inference request: placed, produced, settled, told.

It runs in a task that `api.running` owns. Its connection may die, the client may hang up and the
process may be told to stop: the books are closed in any case, and before the caller hears the end.
"""

import asyncio
from collections.abc import Awaitable

import structlog

from api.authorization import Authorization
from api.choices import Choice, Piece
from api.dependencies import Services
from api.errors import GenerationFailed, SettlementDelayed, StructureRefused, locations
from api.errors import answer as answer_to
from api.express import Express
from api.frames import Frames
from api.placement import Order, Placement, place
from api.prompt_scoring import PromptScoring
from api.shortage import CutShort
from api.stopwatch import Stopwatch
from api.streaming import Answer, ClientGone
from api.summary import Summary
from billing.hold_operations import Hold, Outcome, SettleHold, Settlement, UsageFacts
from common.errors import PlatformError
from engine.messages import GenerateRequest, TokenFrame

log = structlog.get_logger()

ABORTED: Outcome = "aborted"
PLATFORM_FAULT: Outcome = "platform_fault"


class Generation:
    """One request from its order to its settlement."""

    def __init__(self, services: Services, order: Order) -> None:
        self._services = services
        self._order = order
        self._choices = [
            Choice(
                index,
                order.tokenizer,
                order.stop_strings,
                order.reading,
                is_silent=order.max_tokens == 0,
            )
            for index in range(order.num_choices)
        ]
        self._scoring: PromptScoring | None = None
        if order.scoring.num_top is not None:
            self._scoring = PromptScoring(order.tokenizer, order.prompt_token_ids, order.scoring)
        self._placement: Placement | None = None
        self._authorization: Authorization | None = None
        self._abort_outcome: Outcome | None = None
        self._interruptible: asyncio.Task[None] | None = None
        self._stopwatch = Stopwatch(order.arrived_at_s)
        self._ended_by_worker: set[int] = set()

    def abort(self, outcome: Outcome) -> None:
        """Stop producing and close the books; harmless when the end has been reached."""
        if self._abort_outcome is None:
            self._abort_outcome = outcome
            if self._interruptible is not None:
                self._interruptible.cancel()

    async def run(self, answer: Answer) -> None:
        """Produce, settle, tell. Raises only while `answer` has not started: the HTTP status."""
        if self._abort_outcome is not None:
            return
        self._services.running.add(self)
        try:
            outcome, failure = await self._produce(answer)
            settlement = await self._close(outcome)
            if failure is not None:
                raise failure
            if settlement is not None and self._abort_outcome is None:
                await answer.finish(self._summary(settlement))
            elif self._abort_outcome == PLATFORM_FAULT:
                raise GenerationFailed("This server is shutting down. Nothing was charged.")
        except ClientGone:
            log.info("client_gone", request_id=self._order.request_id)
        except Exception as error:
            if not answer.is_started:
                raise
            await self._tell_failure(answer, error)
        finally:
            self._services.running.remove(self)

    # 1. produce

    async def _produce(self, answer: Answer) -> tuple[Outcome, Exception | None]:
        """Everything that may be interrupted. Returns the outcome, and what went wrong if anything.

        Nothing is raised: whatever happened, the books are closed before anybody hears of it.
        """
        self._interruptible = asyncio.current_task()
        try:
            self._placement = await place(self._services, self._order)
            await self._follow(self._placement, answer)
        except asyncio.CancelledError:
            assert self._interruptible is not None
            self._interruptible.uncancel()
            return self._abort_outcome or PLATFORM_FAULT, None
        except (ClientGone, StructureRefused) as ended:
            return ABORTED, ended
        except Exception as error:
            return PLATFORM_FAULT, error
        finally:
            self._interruptible = None
        is_cut = any(choice.finish_reason == "length" for choice in self._choices)
        return "length" if is_cut else "completed", None

    async def _follow(self, placement: Placement, answer: Answer) -> None:
        """Turn frames into text until every choice has ended."""
        authorization = Authorization(self._services, self._order, placement, self._choices)
        self._authorization = authorization
        frames = Frames(self._services, placement, authorization)
        if self._scoring is None:
            express = Express(self._choices, self._stopwatch, authorization, frames, answer)
            placement.stream.sink = express.take
        try:
            await self._read(frames, authorization, answer)
        finally:
            placement.stream.sink = None  # it leads back here, and only a collection would free it

    async def _read(self, frames: Frames, authorization: Authorization, answer: Answer) -> None:
        while not all(choice.finish_reason is not None for choice in self._choices):
            try:
                frame = await frames.next(answer)
            except CutShort as short:
                for choice in self._choices:
                    if (piece := choice.cut_off(short.cut)) is not None:
                        await self._show(piece, answer)
                return
            if frame.is_accepted:
                answer.accept()
                continue
            if frame.prompt_logprobs is not None:
                assert self._scoring is not None
                self._scoring.add(frame.prompt_logprobs)
                continue
            is_first = not self._stopwatch.has_begun
            piece = self._accept(frame)
            authorization.note(frame)
            if is_first:
                answer.begin(self._num_cached_tokens)
            if piece is not None:
                await self._show(piece, answer)

    async def _show(self, piece: Piece, answer: Answer) -> None:
        pieces = [piece] if self._scoring is None else self._scoring.ready(piece)
        for ready in pieces:
            await answer.add(ready)

    def _accept(self, frame: TokenFrame) -> Piece | None:
        """Note what the frame tells and pass its tokens on. Raises GenerationFailed."""
        if frame.is_refused:
            raise StructureRefused(str(frame.error), param=self._order.form_param)
        self._stopwatch.note(frame)
        if frame.error is not None or frame.finish_reason in ("error", "abort"):
            log.error(
                "generation_failed",
                request_id=self._order.request_id,
                model=self._order.listing.model.name,
                reason=frame.error,
            )
            raise GenerationFailed("The model server failed on this request. Nothing was charged.")
        if frame.finish_reason is not None:
            self._ended_by_worker.add(frame.choice)
        choice = self._choices[frame.choice]
        was_open = choice.finish_reason is None
        piece = choice.accept(frame)
        if was_open and choice.finish_reason is not None and frame.finish_reason is None:
            self._release(choice)
        return piece

    def _release(self, choice: Choice) -> None:
        """Its text has ended it: the worker need not go on. The last one ends with the request."""
        assert self._placement is not None
        if any(other.finish_reason is None for other in self._choices):
            broker, request = self._services.broker, self._placement.request
            self._services.running.start(_tell(request, broker.end_choice(request, choice.index)))

    # 2. settle

    async def _close(self, outcome: Outcome) -> Settlement | None:
        """Withdraw what still runs, then settle or void. None: there was nothing to close."""
        placement = self._placement
        if placement is None:
            return None
        hold = placement.hold
        if self._authorization is not None:
            self._authorization.close()
            hold = self._authorization.hold
        if len(self._ended_by_worker) < self._order.num_choices:
            withdrawal = _tell(placement.request, placement.stream.cancel())
            self._services.running.start(withdrawal)
        closing = self._closing(hold, outcome)
        self._services.metrics.observe_generation(
            model=self._order.listing.model.name,
            outcome=outcome,
            timings=self._stopwatch.timings(),
            prompt_tokens=len(self._order.prompt_token_ids),
            output_tokens=self._num_output_tokens,
        )
        done, _ = await asyncio.wait({closing}, timeout=self._services.settings.settle_wait_s)
        if not done:
            raise SettlementDelayed(
                "The answer is complete, but its charge could not be recorded yet. "
                f"GET /v1/generations/{self._order.request_id} will show it.",
                request_id=self._order.request_id,
            )
        return closing.result()

    def _closing(self, hold: Hold, outcome: Outcome) -> "asyncio.Task[Settlement]":
        """Charge for what was accepted; nothing for our faults, or for an abort before prefill."""
        writer, running = self._services.hold_writer, self._services.running
        facts, owner = self._facts(), self._order.owner
        is_free = outcome == PLATFORM_FAULT or not self._stopwatch.has_begun
        if is_free:
            return running.start(
                writer.void(hold.request_id, hold.epoch, outcome, facts, owner=owner)
            )
        return running.start(
            writer.settle(
                SettleHold(
                    request_id=hold.request_id,
                    epoch=hold.epoch,
                    uncached_input_tokens=len(self._order.prompt_token_ids)
                    - self._num_cached_tokens,
                    cached_input_tokens=self._num_cached_tokens,
                    # The fence holds in the worker; nobody pays for more even if it did not.
                    output_tokens=min(self._num_output_tokens, hold.authorized_output_tokens),
                    outcome=outcome,
                    facts=facts,
                    owner=owner,
                )
            )
        )

    @property
    def _num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def _num_cached_tokens(self) -> int:
        return min(self._stopwatch.num_cached_tokens, len(self._order.prompt_token_ids))

    def _facts(self) -> UsageFacts:
        timings = self._stopwatch.timings()
        stream = self._placement.stream if self._placement else None
        reasons = {choice.finish_reason for choice in self._choices} - {None}
        return UsageFacts(
            worker=stream.worker if stream else None,
            attempts=stream.request.attempt if stream else 0,
            ttft_us=timings.ttft_us,
            queued_us=timings.queued_us,
            prefill_us=timings.prefill_us,
            decode_us=timings.decode_us,
            behind_own_us=timings.behind_own_us,
            behind_others_us=timings.behind_others_us,
            tenants_active=timings.tenants_active,
            draft_tokens=timings.draft_tokens,
            accepted_draft_tokens=timings.accepted_draft_tokens,
            finish_reason=",".join(sorted(str(reason) for reason in reasons)) or None,
            streamed=self._order.is_streamed,
        )

    # 3. tell

    def _summary(self, settlement: Settlement) -> Summary:
        return Summary(
            prompt_tokens=len(self._order.prompt_token_ids),
            cached_tokens=self._num_cached_tokens,
            completion_tokens=self._num_output_tokens,
            num_choices=self._order.num_choices,
            charge_nano_usd=settlement.charge_nano_usd,
            available_nano_usd=settlement.available_nano_usd,
            timings=self._stopwatch.timings(),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    async def _tell_failure(self, answer: Answer, error: Exception) -> None:
        """The answer has started: the error becomes its last event."""
        log.error(
            "stream_failed",
            request_id=self._order.request_id,
            error=type(error).__name__,
            locations=locations(error)[-6:],
        )
        try:
            await answer.fail(answer_to(error))
        except ClientGone:
            log.info("client_gone", request_id=self._order.request_id)


async def _tell(request: GenerateRequest, telling: Awaitable[None]) -> None:
    """Let the queue or the worker know what is not wanted any more."""
    try:
        await telling
    except PlatformError as error:
        log.warning("withdrawal_failed", request_id=request.request_id, code=error.code)
