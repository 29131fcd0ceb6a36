"""Prices: versioned and immutable. A request keeps the price that it was admitted at."""

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from billing.errors import InvalidPrice, PriceNotFound
from billing.models import Price
from billing.money import MAX_NANO_USD
from common.clock import Clock, utc_now_us
from common.ids import new_id

__all__ = [
    "Price",
    "Terms",
    "check_price",
    "current_price",
    "current_prices",
    "find_prices",
    "promote",
    "set_price",
]


class Terms(msgspec.Struct, frozen=True):
    """A price that is to be set later, as it is kept until then: nano-dollars per million tokens."""

    input: int
    cached: int
    output: int

    @classmethod
    def checked(cls, input: int, cached: int, output: int) -> "Terms":  # noqa: A002
        """Terms that some model may have. Raises InvalidPrice."""
        check_price(input, cached, output)
        return cls(input, cached, output)

    def encode(self) -> str:
        """As text; `decode` reads it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Terms":
        """What `encode` wrote."""
        return msgspec.json.decode(text, type=cls)


async def current_price(session: AsyncSession, model: str, *, clock: Clock = utc_now_us) -> Price:
    """What `model` costs now; raises PriceNotFound."""
    found = await session.scalars(
        select(Price)
        .where(Price.model == model, Price.valid_from <= clock())
        .order_by(Price.valid_from.desc())
        .limit(1)
    )
    price = found.one_or_none()
    if price is None:
        raise PriceNotFound(f"The model {model} has no price.", model=model)
    return price


async def current_prices(session: AsyncSession, *, clock: Clock = utc_now_us) -> dict[str, Price]:
    """The price of every model that has one, by model."""
    latest = (
        select(Price.model, func.max(Price.valid_from).label("valid_from"))
        .where(Price.valid_from <= clock())
        .group_by(Price.model)
        .subquery()
    )
    found = await session.scalars(
        select(Price).join(
            latest, (Price.model == latest.c.model) & (Price.valid_from == latest.c.valid_from)
        )
    )
    return {price.model: price for price in found}


async def promote(
    session: AsyncSession,
    model: str,
    *,
    input: int,  # noqa: A002 - the field's own word
    cached: int,
    output: int,
    until: int,
    clock: Clock = utc_now_us,
) -> tuple[Price, Price]:
    """A promotional price from now on, and today's price again from `until` (microseconds) on.

    Both are ordinary versions, so that a request keeps the one that it was admitted at. Raises
    PriceNotFound, and InvalidPrice unless it ends in the future and no later version exists.
    """
    regular = await current_price(session, model, clock=clock)
    newest = await session.scalar(select(func.max(Price.valid_from)).where(Price.model == model))
    if until <= clock() + 1 or (newest is not None and newest > clock()):
        raise InvalidPrice("A promotion ends in the future, and before no other.", model=model)
    promotional = await set_price(
        session, model, input=input, cached=cached, output=output, clock=clock
    )
    again = await set_price(
        session,
        model,
        input=regular.input_nano_usd_per_million,
        cached=regular.cached_input_nano_usd_per_million,
        output=regular.output_nano_usd_per_million,
        clock=lambda: until,
    )
    return promotional, again


async def find_prices(session: AsyncSession, price_ids: list[str]) -> dict[str, Price]:
    """Prices of any time by id."""
    found = await session.scalars(select(Price).where(Price.id.in_(price_ids)))
    return {price.id: price for price in found}


def check_price(input: int, cached: int, output: int) -> None:  # noqa: A002
    """Raise InvalidPrice for what no model may cost."""
    if min(input, cached, output) < 0 or max(input, cached, output) > MAX_NANO_USD:
        raise InvalidPrice("A price cannot be negative, nor beyond 64 bits.")
    if cached > input:
        raise InvalidPrice("Cached input may not cost more than fresh input.")


async def set_price(
    session: AsyncSession,
    model: str,
    *,
    input: int,  # noqa: A002 - the field's own word
    cached: int,
    output: int,
    clock: Clock = utc_now_us,
) -> Price:
    """A new price from now on, in nano-dollars per million tokens; raises InvalidPrice."""
    check_price(input, cached, output)
    newest = await session.scalar(select(func.max(Price.valid_from)).where(Price.model == model))
    now = clock()
    price = Price(
        id=new_id("price"),
        model=model,
        # Two changes within one tick of the clock still have an order.
        valid_from=now if newest is None else max(now, newest + 1),
        input_nano_usd_per_million=input,
        cached_input_nano_usd_per_million=cached,
        output_nano_usd_per_million=output,
        created_at=now,
    )
    session.add(price)
    await session.flush()
    return price
