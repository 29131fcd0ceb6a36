"""Models and prices as every request needs them: read from the database at most once a second."""

import asyncio
import difflib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import cast

from api.errors import InvalidRequest
from billing import pricing
from billing.errors import PriceNotFound
from billing.pricing import Price
from common.db import Sessions, read_only
from engine import catalog
from engine.catalog import HostedModel
from engine.errors import ModelNotFound
from engine.pooling import ModelKind

SHOWN_NAME_LENGTH = 100
ROUTES: dict[ModelKind, str] = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
"""Where models of each kind are called."""
AHEAD = 0.6
"""At this part of its age's limit it is read again, so that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A model that may be called, and what it costs."""

    model: HostedModel
    price: Price
    base: HostedModel | None = None
    """What the model is an adapter of, if it is one."""

    @property
    def text_model(self) -> HostedModel:
        """The model whose tokenizer and template it speaks with."""
        return self.base or self.model

    def require(self, kind: ModelKind) -> "Listing":
        """This listing, if it answers with what is asked for. Raises InvalidRequest."""
        if self.model.kind != kind:
            raise InvalidRequest(
                f"The model '{self.model.name}' is not one of {ROUTES[kind]}: it answers at "
                f"{ROUTES[cast(ModelKind, self.model.kind)]}.",
                param="model",
            )
        return self


class Catalogue:
    """The live, priced models by name; at most `ttl_s` old."""

    def __init__(
        self, sessions: Sessions, *, ttl_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._sessions = sessions
        self._ttl_s = ttl_s
        self._monotonic = monotonic
        self._listings: Mapping[str, Listing] = {}
        self._unpriced: frozenset[str] = frozenset()
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None

    async def listings(self) -> Mapping[str, Listing]:
        """All of them, by name."""
        age_s = inf if self._read_at is None else self._monotonic() - self._read_at
        if age_s >= self._ttl_s:
            # Shielded, because others wait for the same.
            await asyncio.shield(self._read_once())
        elif age_s >= AHEAD * self._ttl_s:
            self._read_once()
        return self._listings

    async def find(self, name: str) -> Listing:
        """The listing of `name`. Raises ModelNotFound, or PriceNotFound where it has no price."""
        listing = (await self.listings()).get(name)
        if listing is not None:
            return listing
        if name in self._unpriced:
            raise PriceNotFound(f"The model '{name}' has no price yet.", model=name)
        shown = name if len(name) <= SHOWN_NAME_LENGTH else name[:SHOWN_NAME_LENGTH] + "…"
        hint = "GET /v1/models lists those that do."
        if close := difflib.get_close_matches(shown, self._listings, n=1):
            hint = f"Did you mean '{close[0]}'?"
        raise ModelNotFound(f"The model '{shown}' does not exist. {hint}", model=shown)

    def _read_once(self) -> "asyncio.Task[None]":
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._note_end)
        return self._reading

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()  # whoever waits gets it, too; where nobody does, the next one reads again

    async def _read(self) -> None:
        read_at = self._monotonic()
        async with read_only(self._sessions) as session:
            models = await catalog.live_models(session)
            prices = await pricing.current_prices(session)
            # Kept beyond the transaction, whose end would expire what belongs to it.
            session.expunge_all()
        live = {model.name: model for model in models}
        self._listings = {
            model.name: Listing(model, prices[model.name], live.get(model.base or ""))
            for model in models
            if model.name in prices and (model.base is None or model.base in live)
        }
        self._unpriced = frozenset(model.name for model in models if model.name not in prices)
        self._read_at = read_at
