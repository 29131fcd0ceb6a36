"""Models as the pages list them: catalogue, price and workers put side by side."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy.ext.asyncio import AsyncSession

from billing import pricing
from billing.models import Price
from common.db import read_only
from engine import catalog
from engine.broker.gateway import GatewayBroker
from engine.catalog import HostedModel
from engine.errors import ModelUnavailable
from engine.messages import Heartbeat
from engine.pooling import ModelKind
from web.services import WebServices

HEARTBEAT_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ListedPrice:
    """Nano-dollars per million tokens."""

    input_nano_usd_per_million: int
    cached_input_nano_usd_per_million: int
    output_nano_usd_per_million: int


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One hosted model. A copy of its row, which is readable only inside its transaction."""

    name: str
    description: str
    base: str | None
    """The model that this is an adapter of."""
    kind: ModelKind
    context_length: int
    precision: str
    """What the workers compute it in; the checkpoint's own where none can be asked."""
    architecture: str
    licence: str
    """Empty: unknown."""
    revision: str
    price: ListedPrice | None
    state: str
    """`live`: a worker is ready. `on demand`: one loads it when asked. `starting`, `draining`,
    `offline`: none is ready. `hosted`: the workers cannot be asked."""
    workers: Sequence[Heartbeat]


async def list_models(
    services: WebServices, heartbeats: list[Heartbeat] | None
) -> list[ListedModel]:
    """Every model that is hosted now, by name."""
    async with read_only(services.sessions) as session:
        models = await catalog.live_models(session)
        prices = await pricing.current_prices(session)
        return [_listed(model, prices.get(model.name), heartbeats) for model in models]


async def find_model(services: WebServices, name: str) -> ListedModel:
    """One hosted model; raises ModelNotFound."""
    heartbeats = await read_heartbeats(services.broker)
    async with read_only(services.sessions) as session:
        model = await catalog.find(session, name)
        prices = await pricing.current_prices(session)
        return _listed(model, prices.get(model.name), heartbeats)


async def first_model(session: AsyncSession) -> HostedModel | None:
    """The model that examples name: of those that write, the one that has been hosted longest."""
    models = [each for each in await catalog.live_models(session) if each.kind == "generate"]
    return min(models, key=lambda model: (model.created_at, model.name), default=None)


async def read_heartbeats(broker: GatewayBroker | None) -> list[Heartbeat] | None:
    """What the workers say of themselves; None when they cannot be asked. A page does not wait as
    patiently for Redis as a request for tokens does."""
    if broker is None:
        return None
    try:
        async with asyncio.timeout(HEARTBEAT_PATIENCE_S):
            return await broker.heartbeats(None)
    except (ModelUnavailable, TimeoutError):
        return None


def _listed(
    model: HostedModel, price: Price | None, heartbeats: list[Heartbeat] | None
) -> ListedModel:
    workers = sorted(
        (beat for beat in heartbeats or () if beat.model == model.name),
        key=lambda beat: beat.worker,
    )
    return ListedModel(
        name=model.name,
        description=model.description,
        base=model.base,
        kind=cast(ModelKind, model.kind),
        context_length=model.context_length,
        precision=catalog.precision_of(model, workers),
        architecture=model.architecture,
        licence=model.licence,
        revision=model.revision,
        price=None if price is None else _listed_price(price),
        state="hosted" if heartbeats is None else _state(workers),
        workers=workers,
    )


def _listed_price(price: Price) -> ListedPrice:
    return ListedPrice(
        price.input_nano_usd_per_million,
        price.cached_input_nano_usd_per_million,
        price.output_nano_usd_per_million,
    )


def _state(workers: Sequence[Heartbeat]) -> str:
    states = {beat.state for beat in workers}
    if "ready" in states:
        return "live"
    if states & {"loading", "warming"}:
        return "starting"
    if "unloaded" in states:
        return "on demand"
    return "draining" if "draining" in states else "offline"
