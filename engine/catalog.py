"""Which models are hosted, and which ones people ask for.

The supervisor (on a cluster: Kubernetes) watches `hosted_models` and runs a worker for each live
row; workers themselves have no SQL.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from sqlalchemy import BigInteger, CheckConstraint, Index, String, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from common.clock import utc_now_us
from common.db import Base
from common.errors import PlatformError
from common.ids import new_id
from engine.errors import ModelHasAdapters, ModelNotFound
from engine.messages import Heartbeat
from engine.pooling import ModelKind

ModelState = Literal["live", "draining", "removed"]
RequestStatus = Literal["open", "hosted", "declined"]

MAX_OPEN_REQUESTS = 50
"""Open wishes of one organization; a form is no place to store data."""


class TooManyModelRequests(PlatformError):
    """An organization has as many open wishes as it may."""

    code = "too_many_model_requests"


class HostedModel(Base):
    """A model that the platform serves under its public `name`."""

    __tablename__ = "hosted_models"
    __table_args__ = (CheckConstraint("state IN ('live', 'draining', 'removed')", name="state"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    path: Mapped[str] = mapped_column(String(4096))
    """Directory with the weights, the configs and the tokenizer."""
    revision: Mapped[str] = mapped_column(String(128))
    architecture: Mapped[str] = mapped_column(String(128))
    context_length: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(16))
    description: Mapped[str] = mapped_column(String(1000))
    kind: Mapped[str] = mapped_column(String(16))
    """What it answers with: see `engine.pooling.ModelKind`."""
    base: Mapped[str | None] = mapped_column(String(200))
    """The public name of the model that this is an adapter of; its tokenizer is that one's."""
    licence: Mapped[str] = mapped_column(String(400))
    """As its card or the operator names it; empty: nobody did."""
    state: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[int] = mapped_column(BigInteger)


class ModelRequest(Base):
    """Somebody's wish for a model."""

    __tablename__ = "model_requests"
    __table_args__ = (
        CheckConstraint("status IN ('open', 'hosted', 'declined')", name="status"),
        Index(None, "organization_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organization_id: Mapped[str | None] = mapped_column(String(64))
    email: Mapped[str | None] = mapped_column(String(320))
    name: Mapped[str] = mapped_column(String(200))
    reason: Mapped[str] = mapped_column(String(2000))
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[int] = mapped_column(BigInteger)


async def add_model(
    session: AsyncSession,
    *,
    name: str,
    path: str,
    revision: str,
    architecture: str,
    context_length: int,
    dtype: str,
    description: str = "",
    kind: ModelKind = "generate",
    base: str | None = None,
    licence: str = "",
) -> HostedModel:
    """Host a model, or host it anew from another path or revision. An adapter names its `base`.

    Raises ModelNotFound for an adapter whose base takes no requests any more.
    """
    if base is not None:
        await _lock_base(session, base)
    model = await session.scalar(select(HostedModel).where(HostedModel.name == name))
    if model is None:
        model = HostedModel(id=new_id("model"), name=name, created_at=utc_now_us())
        session.add(model)
    model.path = path
    model.revision = revision
    model.architecture = architecture
    model.context_length = context_length
    model.dtype = dtype
    model.description = description
    model.kind = kind
    model.base = base
    model.licence = licence
    model.state = "live"
    await session.flush()
    return model


def precision_of(model: HostedModel, workers: Iterable[Heartbeat]) -> str:
    """What a model is computed in: as its workers say, else as its checkpoint is stored."""
    if model.kind != "generate":
        return "fp32"  # whatever a worker's other models are computed in
    return ", ".join(sorted({beat.dtype for beat in workers})) or model.dtype


async def live_models(session: AsyncSession) -> list[HostedModel]:
    """Models that take requests, by name."""
    return await models_in(session, "live")


async def models_in(session: AsyncSession, *states: ModelState) -> list[HostedModel]:
    """Models in any of these states, by name."""
    found = await session.scalars(
        select(HostedModel).where(HostedModel.state.in_(states)).order_by(HostedModel.name)
    )
    return list(found)


async def find(session: AsyncSession, name: str, *states: ModelState) -> HostedModel:
    """The model of that name, a live one if no state is named. Raises ModelNotFound."""
    model = await session.scalar(
        select(HostedModel).where(
            HostedModel.name == name, HostedModel.state.in_(states or ("live",))
        )
    )
    if model is None:
        raise ModelNotFound(f"There is no hosted model '{name}'.", model=name)
    return model


async def set_state(session: AsyncSession, name: str, state: ModelState) -> HostedModel:
    """Drain or remove a model, or make it live again.

    Raises ModelNotFound (also for the base of an adapter that is to be live), and ModelHasAdapters
    where live adapters would lose their base.
    """
    assert state in get_args(ModelState), state
    query = select(HostedModel).where(HostedModel.name == name)
    model = await session.scalar(query.with_for_update())
    if model is None:
        raise ModelNotFound(f"There is no hosted model '{name}'.", model=name)
    if state != "live":
        await _refuse_with_adapters(session, name)
    elif model.base is not None:
        await _lock_base(session, model.base)
    model.state = state
    await session.flush()
    return model


async def _lock_base(session: AsyncSession, base: str) -> None:
    """Keep the base of an adapter as it is until this transaction ends: whoever takes it away then
    sees the adapter. Raises ModelNotFound.
    """
    live = HostedModel.name == base, HostedModel.state == "live"
    if await session.scalar(select(HostedModel.id).where(*live).with_for_update()) is None:
        raise ModelNotFound(f"There is no hosted model '{base}'.", model=base)


async def _refuse_with_adapters(session: AsyncSession, name: str) -> None:
    query = select(HostedModel.name).where(HostedModel.base == name, HostedModel.state == "live")
    adapters = list(await session.scalars(query.order_by(HostedModel.name)))
    if adapters:
        raise ModelHasAdapters(
            f"{name} serves adapters: drain or remove {', '.join(adapters)} first.", model=name
        )


async def request_model(
    session: AsyncSession,
    *,
    name: str,
    reason: str = "",
    organization_id: str | None = None,
    email: str | None = None,
) -> ModelRequest:
    """Note a wish; the same open wish of one organization is noted once.

    Raises TooManyModelRequests.
    """
    still_open = list(
        await session.scalars(
            select(ModelRequest)
            .where(ModelRequest.organization_id == organization_id, ModelRequest.status == "open")
            .limit(MAX_OPEN_REQUESTS)
        )
    )
    for known in still_open:
        if known.name == name:
            return known
    if len(still_open) == MAX_OPEN_REQUESTS:
        raise TooManyModelRequests(
            f"You already asked for {MAX_OPEN_REQUESTS} models; we answer those first.",
            limit=MAX_OPEN_REQUESTS,
        )
    wish = ModelRequest(
        id=new_id("wish"),
        organization_id=organization_id,
        email=email,
        name=name,
        reason=reason,
        status="open",
        created_at=utc_now_us(),
    )
    session.add(wish)
    await session.flush()
    return wish


async def answer_requests(session: AsyncSession, name: str) -> None:
    """The model is hosted: those who asked for it see so."""
    wishes = await session.scalars(
        select(ModelRequest).where(ModelRequest.name == name, ModelRequest.status == "open")
    )
    for wish in wishes:
        wish.status = "hosted"
    await session.flush()


async def list_requests(
    session: AsyncSession, *, organization_id: str | None, limit: int = 100
) -> list[ModelRequest]:
    """The wishes of one organization, or (None) of everybody for the operator; newest first."""
    query = select(ModelRequest).order_by(ModelRequest.created_at.desc()).limit(limit)
    if organization_id is not None:
        query = query.where(ModelRequest.organization_id == organization_id)
    return list(await session.scalars(query))
