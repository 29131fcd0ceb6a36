"""The tables of billing. Money is nano-dollars, prices nano-dollars per million tokens.

Append-only by trigger: prices, ledger_transactions, ledger_entries, lot_uses, usage_records.
`balances` and `usage_hours` are projections; `billing.reconcile` rebuilds and compares them.
"""

from typing import Annotated

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    Index,
    String,
    UniqueConstraint,
    literal_column,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from common.db import Base

Int64 = Annotated[int, mapped_column(BigInteger)]
OPEN: ColumnElement[str] = literal_column("'open'")
"""The state of a hold that the partial indexes are for; as a bound value it would hide them."""
OrganizationId = Annotated[str, mapped_column(ForeignKey("organizations.id"))]


class Price(Base):
    """What a model costs from `valid_from` on. Immutable: a new price is a new row."""

    __tablename__ = "prices"
    __table_args__ = (
        UniqueConstraint("model", "valid_from"),
        CheckConstraint(
            "input_nano_usd_per_million >= 0 AND cached_input_nano_usd_per_million >= 0"
            " AND output_nano_usd_per_million >= 0",
            name="not_negative",
        ),
        # Holds are taken at the uncached price, so a cached token may never cost more.
        CheckConstraint(
            "cached_input_nano_usd_per_million <= input_nano_usd_per_million",
            name="cached_not_dearer",
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    valid_from: Mapped[Int64]
    input_nano_usd_per_million: Mapped[Int64]
    cached_input_nano_usd_per_million: Mapped[Int64]
    output_nano_usd_per_million: Mapped[Int64]
    created_at: Mapped[Int64]


class Balance(Base):
    """One organization's money: posted by the ledger, held by open holds. A projection."""

    __tablename__ = "balances"
    __table_args__ = (CheckConstraint("held_nano_usd >= 0", name="held_not_negative"),)

    organization_id: Mapped[OrganizationId] = mapped_column(primary_key=True)
    posted_nano_usd: Mapped[Int64]
    held_nano_usd: Mapped[Int64]


class LedgerTransaction(Base):
    """Entries that belong together and sum to zero. `key` names the real-world cause, once."""

    __tablename__ = "ledger_transactions"
    __table_args__ = (Index(None, "organization_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String, unique=True)
    kind: Mapped[str]
    organization_id: Mapped[OrganizationId]
    actor: Mapped[str]
    memo: Mapped[str]
    created_at: Mapped[Int64]


class LedgerEntry(Base):
    """One amount on one account; positive adds to what the customer has."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        CheckConstraint("amount_nano_usd <> 0", name="not_zero"),
        Index(None, "account"),
    )

    transaction_id: Mapped[str] = mapped_column(
        ForeignKey("ledger_transactions.id"), primary_key=True
    )
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account: Mapped[str]
    amount_nano_usd: Mapped[Int64]


class CreditLot(Base):
    """Credit that came in at once; what is left of it, and what kind of money it is."""

    __tablename__ = "credit_lots"
    __table_args__ = (
        CheckConstraint("kind IN ('promotional', 'goodwill', 'paid')", name="kind"),
        CheckConstraint(
            "remaining_nano_usd >= 0 AND remaining_nano_usd <= amount_nano_usd", name="remaining"
        ),
        Index(None, "organization_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    kind: Mapped[str]
    amount_nano_usd: Mapped[Int64]
    remaining_nano_usd: Mapped[Int64]
    expires_at: Mapped[Int64 | None]
    transaction_id: Mapped[str] = mapped_column(ForeignKey("ledger_transactions.id"), unique=True)
    created_at: Mapped[Int64]


class LotUse(Base):
    """How much of a lot one transaction used up."""

    __tablename__ = "lot_uses"
    __table_args__ = (
        CheckConstraint("amount_nano_usd > 0", name="positive"),
        Index(None, "lot_id"),
    )

    transaction_id: Mapped[str] = mapped_column(
        ForeignKey("ledger_transactions.id"), primary_key=True
    )
    lot_id: Mapped[str] = mapped_column(ForeignKey("credit_lots.id"), primary_key=True)
    amount_nano_usd: Mapped[Int64]


class Gateway(Base):
    """An API process that holds money for requests. Alive while its lease runs (database clock)."""

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(primary_key=True)
    lease_until: Mapped[Int64]
    started_at: Mapped[Int64]


class HoldRecord(Base):
    """Credit reserved for one request, and how it ended. `epoch` fences whoever lost it."""

    __tablename__ = "holds"
    __table_args__ = (
        CheckConstraint("state IN ('open', 'settled', 'voided')", name="state"),
        CheckConstraint("amount_nano_usd >= 0", name="amount_not_negative"),
        CheckConstraint(
            "charge_nano_usd >= 0 AND charge_nano_usd <= amount_nano_usd", name="charge_within"
        ),
        CheckConstraint("(state = 'open') = (charge_nano_usd IS NULL)", name="closed_has_charge"),
        CheckConstraint("state <> 'voided' OR charge_nano_usd = 0", name="void_is_free"),
        Index(
            "ix_holds_open",
            "gateway",
            "organization_id",
            sqlite_where=text("state = 'open'"),
            postgresql_where=text("state = 'open'"),
        ),
        Index(
            "ix_holds_open_of_key",
            "api_key_id",
            sqlite_where=text("state = 'open'"),
            postgresql_where=text("state = 'open'"),
        ),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    api_key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    model: Mapped[str]
    price_id: Mapped[str] = mapped_column(ForeignKey("prices.id"))
    gateway: Mapped[str]
    amount_nano_usd: Mapped[Int64]
    input_tokens: Mapped[Int64]
    authorized_output_tokens: Mapped[Int64]
    epoch: Mapped[int]
    state: Mapped[str]
    charge_nano_usd: Mapped[Int64 | None]
    outcome: Mapped[str | None]
    created_at: Mapped[Int64]
    closed_at: Mapped[Int64 | None]


class UsageRecord(Base):
    """What one request used and cost, written with its closing. Token counts are disjoint."""

    __tablename__ = "usage_records"
    __table_args__ = (
        CheckConstraint("charge_nano_usd >= 0", name="charge_not_negative"),
        CheckConstraint("is_billable OR charge_nano_usd = 0", name="free_if_not_billable"),
        Index(None, "organization_id", "created_at"),
    )

    request_id: Mapped[str] = mapped_column(ForeignKey("holds.request_id"), primary_key=True)
    organization_id: Mapped[OrganizationId]
    api_key_id: Mapped[str | None]
    model: Mapped[str]
    price_id: Mapped[str] = mapped_column(ForeignKey("prices.id"))
    uncached_input_tokens: Mapped[Int64]
    cached_input_tokens: Mapped[Int64]
    output_tokens: Mapped[Int64]
    charge_nano_usd: Mapped[Int64]
    is_billable: Mapped[bool]
    outcome: Mapped[str]
    finish_reason: Mapped[str | None]
    is_streamed: Mapped[bool]
    worker: Mapped[str | None]
    attempts: Mapped[int]
    ttft_us: Mapped[Int64 | None]
    queued_us: Mapped[Int64 | None]
    prefill_us: Mapped[Int64 | None]
    decode_us: Mapped[Int64 | None]
    behind_own_us: Mapped[Int64 | None]
    behind_others_us: Mapped[Int64 | None]
    tenants_active: Mapped[int | None]
    draft_tokens: Mapped[int | None]
    accepted_draft_tokens: Mapped[int | None]
    created_at: Mapped[Int64]

    @property
    def input_tokens(self) -> int:
        """The whole prompt, cached or not."""
        return self.uncached_input_tokens + self.cached_input_tokens


class UsageHour(Base):
    """Sums of usage_records by organization, key, model and UTC hour, written with them."""

    __tablename__ = "usage_hours"

    organization_id: Mapped[OrganizationId] = mapped_column(primary_key=True)
    api_key_id: Mapped[str] = mapped_column(primary_key=True)
    """`session` for requests that a logged-in browser made without a key."""
    model: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[Int64] = mapped_column(primary_key=True, autoincrement=False)
    """Whole hours since the epoch."""
    requests: Mapped[Int64]
    uncached_input_tokens: Mapped[Int64]
    cached_input_tokens: Mapped[Int64]
    output_tokens: Mapped[Int64]
    charge_nano_usd: Mapped[Int64]


class Budget(Base):
    """How much a key, or all keys of a project, may spend in a period. Counts nothing itself."""

    __tablename__ = "budgets"
    __table_args__ = (
        CheckConstraint("(api_key_id IS NULL) <> (project_id IS NULL)", name="one_scope"),
        CheckConstraint("limit_nano_usd >= 0", name="limit_not_negative"),
        CheckConstraint("period IN ('day', 'month', 'total')", name="period"),
        Index(None, "organization_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    api_key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"), unique=True)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"), unique=True)
    period: Mapped[str]
    limit_nano_usd: Mapped[Int64]
    created_at: Mapped[Int64]


class GrantClaim(Base):
    """A free credit that somebody has had. Outlives the account, so that it is given once."""

    __tablename__ = "grant_claims"

    kind: Mapped[str] = mapped_column(primary_key=True)
    subject_hash: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    created_at: Mapped[Int64]
