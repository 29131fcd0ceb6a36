"""From a validated body to a running generation; shared by the routes of every protocol."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from accounts.principal import Principal
from api.body import Body, read_json
from api.catalogue import Listing
from api.conversation import Conversation
from api.dependencies import Services
from api.errors import InvalidRequest
from api.formats import AnswerHead, FormatFactory
from api.generation import ABORTED, PLATFORM_FAULT, Generation
from api.middleware import DIRECT_BODY, SERVER_SEND
from api.outputs.reading import PLAIN, Reading
from api.parts import parts_of
from api.placement import Order
from api.prompt_scoring import NO_SCORING, ScoringWish
from api.schemas.sampling import SamplingBody, stop_strings
from api.streaming import Answer, StreamedAnswer, WholeAnswer
from api.tokenizers import LoadedTokenizer, too_long
from billing.hold_operations import Outcome
from engine.errors import ModelUnavailable
from engine.messages import Structure


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller asked for beside the sampling, in the words of no protocol."""

    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    num_choices: int = 1
    num_logprobs: int | None = None
    scoring: ScoringWish = NO_SCORING


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has been let in: when it came, and who sent it."""

    utc_us: int
    monotonic_s: float
    principal: Principal

    @classmethod
    def now(cls, services: Services, principal: Principal) -> "Arrival":
        """At this moment. Raises ServiceClosing once shutdown has begun."""
        services.running.require_open()
        return cls(services.clock(), time.monotonic(), principal)


KV_SPARE_TOKENS = 64
"""One block of a worker's KV cache: the copy that a second choice of a prompt needs."""


@dataclass(frozen=True, slots=True)
class Intake:
    """A body that has been read, with the model that it asks for."""

    services: Services
    arrival: Arrival
    body: SamplingBody
    listing: Listing
    loaded: LoadedTokenizer
    context_length: int
    """Longest prompt plus output that the model, and a worker's memory, can take."""

    async def chat_order(
        self, request_id: str, conversation: Conversation, limits: Limits
    ) -> Order:
        """The order for a conversation. Raises PromptTooLong, TemplateRejected, InvalidRequest."""
        token_ids = await self.loaded.encode_chat(conversation)
        max_tokens = limits.max_tokens or self.services.settings.default_max_tokens
        limits = replace(limits, max_tokens=max_tokens)
        tokenizer = self.loaded.tokenizer
        reading = conversation.reading(tokenizer, token_ids)
        structure = conversation.structure_for(reading, tokenizer)
        return self.order(request_id, token_ids, limits, reading=reading, structure=structure)

    def order(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        limits: Limits,
        *,
        reading: Reading = PLAIN,
        structure: Structure | None = None,
    ) -> Order:
        """The order for a prompt of ids.

        Raises InvalidRequest for ids that the model has not, PromptTooLong for a prompt that no
        worker's memory takes. An output limit beyond what the context leaves is clamped to that;
        without one, the answer may run to the end of the context.
        """
        if structure is not None:
            self._require_an_end()
        tokenizer = self.loaded.tokenizer
        room = self.context_length - len(prompt_token_ids)
        if room < 1:
            raise too_long(self.context_length, len(prompt_token_ids))
        return Order(
            request_id=request_id,
            principal=self.arrival.principal,
            listing=self.listing,
            tokenizer=tokenizer,
            prompt_token_ids=prompt_token_ids,
            sampling=self.body.sampling(
                vocab_size=tokenizer.vocab_size,
                eos_token_ids=tokenizer.eos_token_ids,
                num_logprobs=limits.num_logprobs,
                num_prompt_logprobs=limits.scoring.num_top,
            ),
            num_choices=limits.num_choices,
            max_tokens=room if limits.max_tokens is None else min(limits.max_tokens, room),
            stop_strings=stop_strings(limits.stops),
            is_streamed=self.body.stream,
            arrived_at_us=self.arrival.utc_us,
            arrived_at_s=self.arrival.monotonic_s,
            reading=reading,
            structure=structure,
            scoring=limits.scoring,
        )

    def _require_an_end(self) -> None:
        """A form says itself where the answer ends. Raises InvalidRequest for what contradicts."""
        for param in ("min_tokens", "ignore_eos"):
            if getattr(self.body, param):
                raise InvalidRequest(
                    f"'{param}' contradicts the form that is required of the answer.", param=param
                )


async def take_in(services: Services, arrival: Arrival, body: SamplingBody) -> Intake:
    """Find the model that `body` asks for. Raises ModelNotFound, and InvalidRequest for one that
    does not write."""
    listing = (await services.catalogue.find(body.model)).require("generate")
    loaded = await services.tokenizers.get(listing.text_model)
    return Intake(
        services, arrival, body, listing, loaded, await _context_length(services, listing)
    )


async def _context_length(services: Services, listing: Listing) -> int:
    """The model's, or what the KV cache of its largest worker has room for, if that is less."""
    try:
        heartbeats = await services.broker.heartbeats(listing.model.name)
    except ModelUnavailable:
        heartbeats = []  # said again, and to the caller, when the request is to be queued
    capacity = max((beat.total_kv_tokens for beat in heartbeats), default=0)
    if capacity == 0:
        return listing.model.context_length
    return min(listing.model.context_length, capacity - KV_SPARE_TOKENS)


async def read(request: Request, schema: type[Body], services: Services) -> Body:
    """The body as `schema`. Raises InvalidRequest and pydantic's ValidationError."""
    return await read_json(request, schema, services.settings)


class GenerationResponse(Response):
    """Runs generations and writes their one answer by raw ASGI messages.

    Each generation belongs to a task of its own. This one, the connection's, only watches the
    client: when it hangs up, streamed or not, the generations are told to stop.
    """

    def __init__(
        self,
        services: Services,
        orders: Sequence[Order],
        model: str,
        format_of: FormatFactory,
        *,
        include_usage: bool = True,
    ) -> None:
        """The orders have the same parameters, and differ in their prompts."""
        super().__init__()
        self._services = services
        self._orders = orders
        order = orders[0]
        self._format = format_of(
            AnswerHead(
                response_id=order.request_id,
                created_s=order.arrived_at_us // 1_000_000,
                model=model,
                include_usage=include_usage,
                has_logprobs=order.sampling.num_logprobs is not None,
                num_prompt_tokens=len(order.prompt_token_ids),
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; raises only what can still become a status."""
        generations = [Generation(self._services, order) for order in self._orders]
        # Begins before the generations do: a client that left while its prompt was tokenized is seen
        # before anything is held or queued for it.
        watching = asyncio.create_task(_abort_at_hang_up(receive, generations))
        try:
            answers = parts_of(
                self._answer(scope, send), len(generations), self._orders[0].num_choices
            )
            producing = {
                self._services.running.start(generation.run(answer))
                for generation, answer in zip(generations, answers, strict=True)
            }
            await self._see_through(generations, producing, watching)
        except asyncio.CancelledError:
            # The server is stopping. The books are closed by the tasks that go on.
            _abort(generations, PLATFORM_FAULT)
            raise
        finally:
            watching.cancel()

    async def _see_through(
        self,
        generations: list[Generation],
        producing: set[asyncio.Task[None]],
        watching: asyncio.Task[None],
    ) -> None:
        """Wait for the end of all; raises the failure of the first that failed."""
        failure: BaseException | None = None
        while producing:
            done, _ = await asyncio.wait(
                producing if watching.done() else {*producing, watching},
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done & producing:
                failure = failure or task.exception()
            producing -= done
            if failure is not None:
                # The caller gets no answer at all: what the others have done is not charged.
                _abort(generations, PLATFORM_FAULT)
        if failure is not None:
            raise failure

    def _answer(self, scope: Scope, send: Send) -> Answer:
        order = self._orders[0]
        if not order.is_streamed:
            return WholeAnswer(send, self._format)
        return StreamedAnswer(
            send,
            scope[SERVER_SEND],
            self._format,
            direct=scope.get(DIRECT_BODY),
            send_timeout_s=self._services.settings.send_timeout_s,
            may_start=order.structure is None,
        )


def _abort(generations: list[Generation], outcome: Outcome) -> None:
    for generation in generations:
        generation.abort(outcome)


async def _abort_at_hang_up(receive: Receive, generations: list[Generation]) -> None:
    await hang_up(receive)
    _abort(generations, ABORTED)


async def hang_up(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        continue
