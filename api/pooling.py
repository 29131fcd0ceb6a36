"""Inputs of one request to vectors: one hold for all of them, a place in the queue for each.

Nothing is computed before the hold is committed. What is charged are the tokens of the inputs; when
the caller hangs up, of those that were answered until then.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.catalogue import Listing
from api.dependencies import Services
from api.errors import GenerationFailed, SettlementDelayed
from api.inference import Arrival, hang_up
from api.placement import cost_model_of
from api.pooled_inputs import PooledInput
from api.stopwatch import Stopwatch
from api.summary import Summary
from billing.hold_operations import AdmitHold, Hold, Outcome, SettleHold, Settlement, UsageFacts
from common.errors import PlatformError
from engine.broker.stream import RequestStream
from engine.cost_model import UNCALIBRATED, queue_price
from engine.errors import ModelUnavailable, RequestLost
from engine.messages import CostModel, GenerateRequest, Sampling, TokenFrame

log = structlog.get_logger()

WINDOW = 256
"""Inputs of one request that are queued at the same time."""
ROWS_PER_TURN = 16
"""Rows of an answer that are written before other tasks get their turn: about a millisecond."""


@dataclass(frozen=True, slots=True)
class PooledOrder:
    """A validated request, not yet paid for."""

    request_id: str
    arrival: Arrival
    listing: Listing
    inputs: list[PooledInput]

    @property
    def num_tokens(self) -> int:
        """Of all inputs: what is held and billed."""
        return sum(len(each.token_ids) for each in self.inputs)


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """Every input's vector, fp32 and little-endian, and what all of them cost."""

    request_id: str
    vectors: list[bytes]
    summary: Summary

    def told(self) -> dict[str, object]:
        """What ends every answer: `usage` without output tokens, and `timing`."""
        usage = self.summary.usage()
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return {"usage": counts | self.summary.money(), "timing": self.summary.timing()}


class PooledJob:
    """One request from its order to its settlement. See `api.running.Abortable`."""

    def __init__(self, services: Services, order: PooledOrder) -> None:
        self._services = services
        self._order = order
        self._vectors: dict[int, bytes] = {}
        self._stopwatch = Stopwatch(order.arrival.monotonic_s)
        self._worker: str | None = None
        self._attempts = 1
        self._abort_outcome: Outcome | None = None
        self._computing: asyncio.Task[None] | None = None

    def abort(self, outcome: Outcome) -> None:
        """Stop computing and close the books; harmless when the end has been reached."""
        if self._abort_outcome is None:
            self._abort_outcome = outcome
            if self._computing is not None:
                self._computing.cancel()

    async def run(self) -> PooledAnswer:
        """Hold, compute, settle. Raises what becomes the HTTP status; nothing is charged then."""
        running = self._services.running
        running.add(self)
        try:
            hold = await self._admit()
            self._computing = running.start(self._compute())
            if self._abort_outcome is not None:
                self._computing.cancel()
            await asyncio.wait({self._computing})
            failure = None if self._computing.cancelled() else self._computing.exception()
            settlement = await self._close(hold, failure)
            if failure is not None:
                raise failure
            if len(self._vectors) < len(self._order.inputs):
                raise GenerationFailed("This server is shutting down. Nothing was charged.")
            return self._answer(settlement)
        finally:
            running.remove(self)

    async def _admit(self) -> Hold:
        order = self._order
        principal = order.arrival.principal
        return await self._services.hold_writer.admit(
            AdmitHold(
                request_id=order.request_id,
                organization_id=principal.organization_id,
                api_key_id=principal.api_key_id,
                model=order.listing.model.name,
                price_id=order.listing.price.id,
                gateway=self._services.gateway_id,
                input_tokens=order.num_tokens,
                output_tokens=0,
            )
        )

    # computing

    async def _compute(self) -> None:
        """Every input's vector. Raises the failure of the first that fails."""
        cost_model = await cost_model_of(self._services, self._order.listing.model.name)
        gate = asyncio.Semaphore(WINDOW)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._order.inputs)):
                    await gate.acquire()
                    group.create_task(self._compute_one(index, cost_model, gate))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _compute_one(
        self, index: int, cost_model: CostModel | None, gate: asyncio.Semaphore
    ) -> None:
        stream: RequestStream | None = None
        try:
            request = self._engine_request(index, cost_model or UNCALIBRATED)
            broker = self._services.broker
            stream = await broker.submit(broker.prepare(request))
            frame = await self._frame_of(stream)
            if frame.vector is None:
                log.error("pooling_failed", request_id=request.request_id, reason=frame.error)
                raise GenerationFailed(
                    "The model server failed on this request. Nothing was charged."
                )
            self._vectors[index] = frame.vector
            self._stopwatch.note(frame)
            self._worker = stream.worker
            self._attempts = max(self._attempts, stream.request.attempt)
        except BaseException:
            if stream is not None:
                self._services.running.start(_withdraw(stream))
            raise
        finally:
            gate.release()

    def _engine_request(self, index: int, cost_model: CostModel) -> GenerateRequest:
        order, each = self._order, self._order.inputs[index]
        arrival_ms = order.arrival.utc_us // 1_000
        price = queue_price(
            cost_model,
            len(each.token_ids),
            arrival_ms=arrival_ms,
            alpha=self._services.settings.priority_alpha,
        )
        return GenerateRequest(
            request_id=f"{order.request_id}-{index}" if index else order.request_id,
            model=order.listing.model.name,
            node=self._services.broker.node,
            tenant=order.arrival.principal.organization_id,
            prompt_token_ids=each.token_ids,
            sampling=Sampling(),
            authorized_tokens=1,  # the vector stands where a token would
            max_tokens=1,
            arrival_ms=arrival_ms,
            key=price.key,
            work_s=price.work_s,
            is_pooled=True,
            second_text_at=each.second_text_at,
        )

    async def _frame_of(self, stream: RequestStream) -> TokenFrame:
        """The one frame. Raises ModelUnavailable when no worker has lived for too long."""
        settings, model = self._services.settings, stream.request.model
        alive_at_s = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(settings.queue_report_interval_s):
                    return await anext(stream)
            except TimeoutError:
                now_s = time.monotonic()
            except StopAsyncIteration:
                raise RequestLost(
                    "The model server was lost. Nothing was charged; please try again.",
                    request_id=stream.request.request_id,
                ) from None
            if await self._has_worker(model):
                alive_at_s = now_s
            elif now_s - alive_at_s > settings.model_wait_s:
                raise ModelUnavailable(
                    f"No server runs the model '{model}' at the moment. "
                    "Nothing was charged; please try again in a moment.",
                    model=model,
                )

    async def _has_worker(self, model: str) -> bool:
        try:
            return bool(await self._services.broker.heartbeats(model))
        except ModelUnavailable:
            return False

    # the books

    async def _close(self, hold: Hold, failure: BaseException | None) -> Settlement:
        """Settle what was answered; nothing for our faults, or when nothing was."""
        services, timings = self._services, self._stopwatch.timings()
        outcome: Outcome = "completed"
        if failure is not None or len(self._vectors) < len(self._order.inputs):
            outcome = (failure is None and self._abort_outcome) or "platform_fault"
        answered = sum(len(self._order.inputs[index].token_ids) for index in self._vectors)
        facts = UsageFacts(
            worker=self._worker,
            attempts=self._attempts,
            ttft_us=timings.ttft_us,
            queued_us=timings.queued_us,
            prefill_us=timings.prefill_us,
            behind_own_us=timings.behind_own_us,
            behind_others_us=timings.behind_others_us,
            tenants_active=timings.tenants_active,
            finish_reason="stop" if outcome == "completed" else None,
        )
        services.metrics.observe_generation(
            model=self._order.listing.model.name,
            outcome=outcome,
            timings=timings,
            prompt_tokens=answered,
            output_tokens=0,
        )
        writer = services.hold_writer
        if outcome == "platform_fault" or not answered:
            ending = writer.void(hold.request_id, hold.epoch, outcome, facts)
        else:
            ending = writer.settle(
                SettleHold(hold.request_id, hold.epoch, answered, 0, 0, outcome, facts)
            )
        closing = services.running.start(ending)
        done, _ = await asyncio.wait({closing}, timeout=services.settings.settle_wait_s)
        if not done:
            raise SettlementDelayed(
                "The answer is complete, but its charge could not be recorded yet. "
                f"GET /v1/generations/{self._order.request_id} will show it.",
                request_id=self._order.request_id,
            )
        return closing.result()

    def _answer(self, settlement: Settlement) -> PooledAnswer:
        order = self._order
        summary = Summary(
            prompt_tokens=order.num_tokens,
            cached_tokens=0,
            completion_tokens=0,
            num_choices=1,
            charge_nano_usd=settlement.charge_nano_usd,
            available_nano_usd=settlement.available_nano_usd,
            timings=self._stopwatch.timings(),
            num_prompts=len(order.inputs),
        )
        vectors = [self._vectors[index] for index in range(len(order.inputs))]
        return PooledAnswer(order.request_id, vectors, summary)


async def _withdraw(stream: RequestStream) -> None:
    """Tell the queue or the worker that nobody waits for it."""
    try:
        await stream.cancel()
    except PlatformError as error:
        log.warning("withdrawal_failed", request_id=stream.request.request_id, code=error.code)


class PooledResponse(Response):
    """Runs a job and writes its answer; when the client hangs up, the job is told to stop."""

    media_type = "application/json"

    def __init__(
        self,
        services: Services,
        order: PooledOrder,
        write: Callable[[PooledAnswer], Iterator[bytes]],
    ) -> None:
        """`write` gives the JSON in pieces, the larger part of them rows."""
        super().__init__()
        self._services = services
        self._job = PooledJob(services, order)
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; raises only what can still become a status."""
        watching = asyncio.create_task(hang_up(receive))
        try:
            await asyncio.sleep(0)  # a client that has left by now is seen, and pays nothing
            if watching.done():
                return
            working = self._services.running.start(self._job.run())
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._job.abort("aborted")
                return
            await self._send(send, working.result())
        except asyncio.CancelledError:
            self._job.abort("platform_fault")  # the server is stopping
            raise
        finally:
            watching.cancel()

    async def _send(self, send: Send, answer: PooledAnswer) -> None:
        pieces: list[bytes] = []
        for piece in self._write(answer):
            pieces.append(piece)
            if len(pieces) % ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
        body = b"".join(pieces)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
