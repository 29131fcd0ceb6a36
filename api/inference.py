"""From a validated body to a running generation; shared by the routes that generate."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from accounts.principal import Principal
from api.catalogue import Listing
from api.dependencies import Services
from api.formats import Format
from api.generation import ABORTED, PLATFORM_FAULT, Generation
from api.placement import Order
from api.schemas.sampling import GenerationBody
from api.streaming import Answer, StreamedAnswer, WholeAnswer
from engine.tokenization import Tokenizer

FormatFactory = Callable[..., Format]


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request arrived, by the clock on the wall and by the one that never jumps."""

    utc_us: int
    monotonic_s: float

    @classmethod
    def now(cls, services: Services) -> "Arrival":
        """This moment."""
        return cls(services.clock(), time.monotonic())


def order_of(
    body: GenerationBody,
    *,
    request_id: str,
    arrival: Arrival,
    principal: Principal,
    listing: Listing,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    output_limit: int | None,
    num_logprobs: int | None,
) -> Order:
    """The order for a validated body. Raises InvalidRequest for ids outside of the vocabulary.

    An output limit beyond what the context leaves is clamped to that; without one, the answer may
    run to the end of the context.
    """
    room = listing.model.context_length - len(prompt_token_ids)
    return Order(
        request_id=request_id,
        principal=principal,
        listing=listing,
        tokenizer=tokenizer,
        prompt_token_ids=prompt_token_ids,
        sampling=body.sampling(
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            num_logprobs=num_logprobs,
        ),
        num_choices=body.n,
        max_tokens=min(output_limit or room, room),
        stop_strings=body.stop_strings,
        is_streamed=body.stream,
        arrived_at_us=arrival.utc_us,
        arrived_at_s=arrival.monotonic_s,
    )


class GenerationResponse(Response):
    """Runs a generation and writes its answer by raw ASGI messages.

    The generation belongs to a task of its own. This one, the connection's, only watches the
    client: when it hangs up, streamed or not, the generation is told to stop.
    """

    def __init__(
        self, services: Services, order: Order, body: GenerationBody, format_of: FormatFactory
    ) -> None:
        super().__init__()
        self._services = services
        self._order = order
        self._include_usage = body.include_usage
        self._format = format_of(
            response_id=order.request_id,
            created_s=order.arrived_at_us // 1_000_000,
            model=body.model,
            include_usage=body.include_usage,
            has_logprobs=order.sampling.num_logprobs is not None,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; raises only what can still become a status."""
        generation = Generation(self._services, self._order)
        watching = asyncio.create_task(hang_up(receive))
        try:
            # One turn of the loop: a client that left while its prompt was tokenized is seen now,
            # before anything is held or queued for it.
            await asyncio.sleep(0)
            if watching.done():
                return
            producing = self._services.running.start(generation.run(self._answer(send)))
            await asyncio.wait({producing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not producing.done():
                generation.abort(ABORTED)
            await asyncio.shield(producing)
        except asyncio.CancelledError:
            # The server is stopping. The books are closed by the task that goes on.
            generation.abort(PLATFORM_FAULT)
            raise
        finally:
            watching.cancel()

    def _answer(self, send: Send) -> Answer:
        if not self._order.is_streamed:
            return WholeAnswer(send, self._format)
        return StreamedAnswer(
            send,
            self._format,
            include_usage=self._include_usage,
            send_timeout_s=self._services.settings.send_timeout_s,
        )


async def hang_up(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        continue
