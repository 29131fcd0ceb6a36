"""Models on their way into the catalogue: what an operator asked for, and how far it has come.

The command line and the admin API only write a row here; the supervisor carries it out, step by step,
beside everything that runs. A row that fails names its step and its reason, and nothing else is left.
"""

from collections.abc import Sequence
from typing import Literal

from sqlalchemy import BigInteger, CheckConstraint, String, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from common.clock import utc_now_us
from common.db import Base
from common.ids import new_id
from engine.catalog import HostedModel
from engine.catalog import find as find_model
from engine.errors import AdditionNotFound, AdditionRefused

AdditionState = Literal["waiting", "fetching", "checking", "loading", "testing", "live", "failed"]
OPEN_STATES: tuple[AdditionState, ...] = ("waiting", "fetching", "checking", "loading", "testing")
DETAIL_LENGTH_MAX = 1000
MAX_OPEN = 100
LENGTHS = {"source": 4_096, "name": 200, "base": 200, "description": 1_000, "licence": 100}
"""Characters that the row has room for."""


class ModelAddition(Base):
    """One attempt to host a model."""

    __tablename__ = "model_additions"
    __table_args__ = (
        CheckConstraint(
            "state IN ('waiting', 'fetching', 'checking', 'loading', 'testing', 'live', 'failed')",
            name="state",
        ),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    source: Mapped[str] = mapped_column(String(4096))
    """A directory, a `.gguf` file, or a hub's `owner/name`."""
    name: Mapped[str] = mapped_column(String(200))
    """The public name; empty until it is known, where the source names it."""
    description: Mapped[str] = mapped_column(String(1000))
    licence: Mapped[str] = mapped_column(String(100))
    """What the operator says it is; empty: what the checkpoint says counts."""
    base: Mapped[str] = mapped_column(String(200))
    """The hosted model that it is an adapter of, where the operator says it."""
    allows_pickles: Mapped[bool]
    """The operator trusts its pickles enough to have tensors read from them."""
    terms: Mapped[str] = mapped_column(String(1000))
    """What is to be set with it when it goes live, in the words of whoever asked: prices as JSON."""
    state: Mapped[str] = mapped_column(String(16))
    failed_step: Mapped[str | None] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(String(DETAIL_LENGTH_MAX))
    """What is being done, what was found, or why it failed: one sentence."""
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)
    updated_at: Mapped[int] = mapped_column(BigInteger)


async def ask(
    session: AsyncSession,
    *,
    source: str,
    name: str = "",
    description: str = "",
    licence: str = "",
    base: str = "",
    allows_pickles: bool = False,
    terms: str,
) -> ModelAddition:
    """Put an addition in line. Raises AdditionRefused, ModelNotFound where its base is not hosted."""
    require_short(source=source, name=name, base=base, description=description, licence=licence)
    waiting = await unfinished(session)
    if any(source == other.source or (name and name == other.name) for other in waiting):
        raise AdditionRefused(f"{name or source} is being added already.")
    if len(waiting) >= MAX_OPEN:
        raise AdditionRefused(f"{MAX_OPEN} models are being added already.")
    if name:
        await refuse_hosted(session, name)
    if base:
        await find_model(session, base)
    now = utc_now_us()
    addition = ModelAddition(
        id=new_id("addition"),
        source=source,
        name=name,
        description=description,
        licence=licence,
        base=base,
        allows_pickles=allows_pickles,
        terms=terms,
        state="waiting",
        failed_step=None,
        detail="for its turn",
        created_at=now,
        updated_at=now,
    )
    session.add(addition)
    await session.flush()
    return addition


def require_short(**said: str) -> None:
    """Raise AdditionRefused for what is longer than its column, or no single line."""
    for what, text in said.items():
        if len(text) > LENGTHS[what]:
            raise AdditionRefused(f"The {what} is longer than {LENGTHS[what]:,} characters.")
        if not text.isprintable() and what != "description":
            raise AdditionRefused(f"The {what} has characters that cannot be printed.")


async def refuse_hosted(session: AsyncSession, name: str) -> None:
    """Raise AdditionRefused where a model of that name takes requests."""
    known = await session.scalar(
        select(HostedModel.id).where(HostedModel.name == name, HostedModel.state == "live")
    )
    if known is not None:
        raise AdditionRefused(
            f"{name} is hosted already: drain it first, or set its price.", model=name
        )


async def unfinished(session: AsyncSession) -> Sequence[ModelAddition]:
    """Those that are neither live nor failed, in the order in which they were asked for."""
    query = select(ModelAddition).where(ModelAddition.state.in_(OPEN_STATES))
    return list(await session.scalars(query.order_by(ModelAddition.created_at, ModelAddition.id)))


async def recent(session: AsyncSession, limit: int = 50) -> Sequence[ModelAddition]:
    """The newest first."""
    query = select(ModelAddition).order_by(ModelAddition.created_at.desc()).limit(limit)
    return list(await session.scalars(query))


async def find(session: AsyncSession, addition_id: str) -> ModelAddition:
    """One of them. Raises AdditionNotFound."""
    addition = await session.get(ModelAddition, addition_id)
    if addition is None:
        raise AdditionNotFound("There is no such addition.", addition=addition_id)
    return addition


async def note(
    session: AsyncSession,
    addition_id: str,
    state: AdditionState,
    detail: str,
    *,
    name: str | None = None,
) -> None:
    """The addition has come so far; a failure keeps the step that it failed at."""
    addition = await find(session, addition_id)
    if state == "failed":
        addition.failed_step = addition.state
    addition.state = state
    addition.detail = detail[:DETAIL_LENGTH_MAX]
    addition.name = name or addition.name
    addition.updated_at = utc_now_us()
    await session.flush()
