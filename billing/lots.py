"""Credit lots: which credit is used first, and what kind it was.

Order: credit that nobody paid for before paid credit, then what expires first, then the oldest.
What is left in an organization's lots is always its posted balance, or nothing if that is negative.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import BigInteger, bindparam, cast, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from billing.models import CreditLot
from common.round_trip import Call, Row, Statement, send_together

LotKind = Literal["promotional", "goodwill", "paid"]
_NEVER = 2**63 - 1

_LOT = CreditLot.__table__.c
_OPEN_LOTS = Statement.of(
    select(
        _LOT.id,
        _LOT.organization_id,
        _LOT.kind,
        _LOT.remaining_nano_usd,
        _LOT.expires_at,
        _LOT.created_at,
    ).where(
        _LOT.organization_id == bindparam("organization_id"),
        _LOT.remaining_nano_usd > literal_column("0"),
    )
)


@dataclass(slots=True)
class OpenLot:
    """A lot with something left in it, as one transaction sees and changes it."""

    id: str
    organization_id: str
    kind: str
    remaining_nano_usd: int
    expires_at: int | None
    created_at: int

    @property
    def is_paid(self) -> bool:
        """Was this credit bought? Then using it is revenue."""
        return self.kind == "paid"

    @property
    def order(self) -> tuple[bool, int, int, str]:
        """The least is used first."""
        expires_at = _NEVER if self.expires_at is None else self.expires_at
        return (self.is_paid, expires_at, self.created_at, self.id)


@dataclass(frozen=True, slots=True)
class Use:
    """A part of a transaction that one lot pays for."""

    lot_id: str
    amount_nano_usd: int
    is_paid: bool


def asking_for_lots(organization_ids: Iterable[str]) -> Call:
    """Ask for the lots with something left. The balances are locked before."""
    return Call(_OPEN_LOTS, [{"organization_id": one} for one in sorted(set(organization_ids))])


def in_order(rows: Iterable[Row]) -> dict[str, list[OpenLot]]:
    """What was asked for, by organization and in order of use."""
    lots: dict[str, list[OpenLot]] = {}
    for lot in sorted((OpenLot(*row) for row in rows), key=lambda lot: lot.order):
        lots.setdefault(lot.organization_id, []).append(lot)
    return lots


async def load_open_lots(session: AsyncSession, organization_id: str) -> list[OpenLot]:
    """Lots with something left, in order of use. The caller has locked the balance."""
    (found,) = await send_together(await session.connection(), [asking_for_lots([organization_id])])
    return in_order(found.rows).get(organization_id, [])


@dataclass(frozen=True, slots=True)
class Ending:
    """Credit that ends together."""

    amount_nano_usd: int
    ends_at: int


async def next_end(session: AsyncSession, organization_id: str) -> Ending | None:
    """What ends first of an organization's credit; None when nothing of it ends."""
    found = await session.execute(
        select(CreditLot.expires_at, cast(func.sum(CreditLot.remaining_nano_usd), BigInteger))
        .where(
            CreditLot.organization_id == organization_id,
            CreditLot.remaining_nano_usd > 0,
            CreditLot.expires_at.is_not(None),
        )
        .group_by(CreditLot.expires_at)
        .order_by(CreditLot.expires_at)
        .limit(1)
    )
    row = found.one_or_none()
    return None if row is None or row[0] is None else Ending(row[1], row[0])


def use(lots: list[OpenLot], amount: int) -> list[Use]:
    """Take `amount` from the lots in order; less when they hold less, for a balance below zero."""
    uses = []
    for lot in lots:
        taken = min(lot.remaining_nano_usd, amount)
        if taken > 0:
            lot.remaining_nano_usd -= taken
            amount -= taken
            uses.append(Use(lot.id, taken, lot.is_paid))
    return uses
