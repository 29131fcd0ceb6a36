"""The frames of one placed request: the wait for each of them, and what the caller hears meanwhile.

A request waits in the queue before its first token, and again when its server was lost and another
one has to take it over. Both waits are told alike. It waits for credit where none is left.
"""

import time
from dataclasses import replace

from api.authorization import Authorization
from api.dependencies import Services
from api.placement import Placement
from api.streaming import Answer
from common.patience import Patience
from engine.broker.positions import QueuePosition
from engine.errors import ModelUnavailable, RequestLost
from engine.messages import TokenFrame


class Frames:
    """Frames of one request, one at a time."""

    def __init__(
        self, services: Services, placement: Placement, authorization: Authorization
    ) -> None:
        self._settings = services.settings
        self._broker = services.broker
        self._placement = placement
        self._patience = Patience(services.settings.queue_report_interval_s)
        self._authorization = authorization
        self._silent_since_s = self._alive_at_s = time.monotonic()

    def note_taken(self) -> None:
        """A frame has been taken past this reader."""
        self._silent_since_s = self._alive_at_s = time.monotonic()
        self._patience.postpone()

    async def next(self, answer: Answer) -> TokenFrame:
        """The next frame; until it comes, `answer` hears where the request stands in the queue.

        Raises ModelUnavailable when the model has had no live worker for too long, RequestLost when
        the request was given up or its worker says nothing for too long, and what
        `Authorization.pause` raises.
        """
        self._silent_since_s = self._alive_at_s = time.monotonic()
        stream = self._placement.stream
        while True:
            if (pause := self._authorization.pause()) is not None:
                await answer.report_pause(pause)
                self._silent_since_s = self._alive_at_s = time.monotonic()
            try:
                with self._patience:
                    return await anext(stream)
            except TimeoutError:
                now_s = time.monotonic()
            except StopAsyncIteration:
                raise self._lost() from None
            if pause is not None:
                continue
            await self._authorization.repeat()
            if stream.is_running:
                self._alive_at_s = now_s
                if now_s - self._silent_since_s > self._settings.silence_timeout_s:
                    raise self._lost()
            elif (place := await self._place_in_queue()) is not None:
                self._alive_at_s = time.monotonic()
                await answer.report_queue(place)
            elif now_s - self._alive_at_s > self._settings.model_wait_s and not stream.is_running:
                raise self._unavailable()

    async def _place_in_queue(self) -> QueuePosition | None:
        """Where the request stands; None when no worker serves it, or the queue does not answer."""
        request = self._placement.request
        try:
            serving = [
                beat for beat in await self._broker.heartbeats(request.model) if beat.is_serving
            ]
            if not serving:
                return None
            place = await self._broker.position(request)
        except ModelUnavailable:
            return None
        is_loading = not any(beat.is_loaded for beat in serving)
        return replace(place, is_model_loading=is_loading)

    def _unavailable(self) -> ModelUnavailable:
        model = self._placement.request.model
        return ModelUnavailable(
            f"No server runs the model '{model}' at the moment. "
            "Nothing was charged; please try again in a moment.",
            model=model,
        )

    def _lost(self) -> RequestLost:
        return RequestLost(
            "The model server was lost before the answer was complete. Nothing was charged; "
            "please try again.",
            request_id=self._placement.request.request_id,
        )
