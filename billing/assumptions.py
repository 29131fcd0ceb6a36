"""What nearly every admission finds, so that it is not asked for first.

A group of admissions is decided as if every organization were active and had enough, every key were
live and had no budget, and no request had been seen before. It is committed with guards that hold all
of this against the rows themselves: one round trip instead of two for those who wait for their first
token. Where anything is not as assumed, nothing is committed, and `billing.book_reader` looks.
"""

from collections.abc import Sequence

from sqlalchemy import bindparam, exists, literal_column, or_, select

from accounts.models import ApiKey, Organization
from billing.book_reader import Account, Key, Reading
from billing.hold_operations import AdmitHold
from billing.models import Budget
from common.round_trip import Call, Statement

ENOUGH_NANO_USD = 2**60
"""The guard of the balance knows what there is."""

_LIVE_WITHOUT_BUDGET = Statement.of(
    select(ApiKey.id).where(
        ApiKey.id == bindparam("key_id"),
        ApiKey.organization_id == bindparam("organization_id"),
        ApiKey.revoked_at.is_(None),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > bindparam("now_us")),
        ~exists().where(Budget.api_key_id == ApiKey.id),
        ~exists().where(Budget.project_id == ApiKey.project_id),
    )
)
_ACTIVE = Statement.of(
    select(Organization.id).where(
        Organization.id == bindparam("organization_id"),
        Organization.status == literal_column("'active'"),
    )
)


def assumed(admits: Sequence[AdmitHold], *, now_us: int) -> Reading:
    """What `billing.book_reader` would find."""
    keys = {one.api_key_id: one.organization_id for one in admits if one.api_key_id is not None}
    return Reading(
        now_us=now_us,
        holds={},
        accounts={one.organization_id: Account("active", ENOUGH_NANO_USD, 0) for one in admits},
        keys={key_id: Key(owner, None, None, ()) for key_id, owner in keys.items()},
        lots={},
        budgets={key_id: [] for key_id in keys},
    )


def guards(admits: Sequence[AdmitHold], *, now_us: int) -> list[Call]:
    """Each must find its row, or the assumption is wrong. The balances guard themselves."""
    keyed = {(one.api_key_id, one.organization_id) for one in admits if one.api_key_id is not None}
    return [
        Call(
            _LIVE_WITHOUT_BUDGET,
            [
                {"key_id": key_id, "organization_id": owner, "now_us": now_us}
                for key_id, owner in keyed
            ],
        ),
        Call(_ACTIVE, [{"organization_id": one} for one in {a.organization_id for a in admits}]),
    ]
