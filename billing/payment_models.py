"""The tables of payments: mirrors of what exists at Stripe, and what we have asked for.

Each row is committed before the call that it is about; each converges to the object at Stripe that
it names. Amounts at Stripe are whole cents.
"""

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    Index,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from billing.models import Int64, OrganizationId
from common.db import Base

NANO_USD_PER_CENT = 10_000_000
OPEN_STATES = ("pending", "processing", "review")
"""States of a top-up that may still become paid by itself."""
_IS_OPEN_RECHARGE = text("kind = 'recharge' AND state IN ('pending', 'processing', 'review')")
_IS_UNPROCESSED = text("processed_at IS NULL")


class PaymentProfile(Base):
    """Who an organization is at Stripe, its saved card, and when that card may be charged."""

    __tablename__ = "payment_profiles"
    __table_args__ = (
        CheckConstraint(
            "recharge_threshold_nano_usd >= 0 AND recharge_cents > 0"
            " AND recharge_month_cap_cents >= recharge_cents",
            name="recharge_amounts",
        ),
    )

    organization_id: Mapped[OrganizationId] = mapped_column(primary_key=True)
    customer_id: Mapped[str | None] = mapped_column(String, unique=True)
    payment_method_id: Mapped[str | None]
    card_label: Mapped[str | None]
    """`visa 4242`: enough for its owner to know it."""
    is_recharge_on: Mapped[bool]
    recharge_threshold_nano_usd: Mapped[Int64]
    recharge_cents: Mapped[Int64]
    recharge_month_cap_cents: Mapped[Int64]
    failed_recharges: Mapped[int]
    """In a row; the third switches it off."""
    paused_because: Mapped[str | None]
    created_at: Mapped[Int64]


class Topup(Base):
    """Money that a customer pays in: by Checkout, or from the saved card by itself."""

    __tablename__ = "topups"
    __table_args__ = (
        UniqueConstraint("organization_id", "idempotency_key"),
        CheckConstraint("kind IN ('checkout', 'recharge')", name="kind"),
        CheckConstraint(
            "state IN ('pending', 'processing', 'review', 'paid', 'failed', 'expired')",
            name="state",
        ),
        CheckConstraint("amount_cents > 0", name="amount_positive"),
        Index(None, "organization_id", "created_at"),
        Index(
            "uq_topups_open_recharge",
            "organization_id",
            unique=True,
            sqlite_where=_IS_OPEN_RECHARGE,
            postgresql_where=_IS_OPEN_RECHARGE,
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    kind: Mapped[str]
    amount_cents: Mapped[Int64]
    state: Mapped[str]
    idempotency_key: Mapped[str]
    session_id: Mapped[str | None] = mapped_column(String, unique=True)
    payment_intent_id: Mapped[str | None] = mapped_column(String, unique=True)
    receipt_url: Mapped[str | None]
    failure: Mapped[str | None]
    created_at: Mapped[Int64]
    updated_at: Mapped[Int64]

    @property
    def amount_nano_usd(self) -> int:
        """The credit that it is."""
        return self.amount_cents * NANO_USD_PER_CENT


class Refund(Base):
    """Money given back. Its credit is taken when it is asked for, and returned if it fails."""

    __tablename__ = "refunds"
    __table_args__ = (
        CheckConstraint("state IN ('requested', 'taken', 'failed')", name="state"),
        CheckConstraint("amount_cents > 0", name="amount_positive"),
        Index(None, "topup_id"),
        Index(None, "organization_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """Ours, or Stripe's `re_…` when it was made in their dashboard."""
    organization_id: Mapped[OrganizationId]
    topup_id: Mapped[str] = mapped_column(ForeignKey("topups.id"))
    stripe_refund_id: Mapped[str | None] = mapped_column(String, unique=True)
    amount_cents: Mapped[Int64]
    state: Mapped[str]
    """`requested`: taken from the customer, not yet known to Stripe."""
    reason: Mapped[str]
    created_at: Mapped[Int64]
    updated_at: Mapped[Int64]


class Dispute(Base):
    """A payment that the card's owner contests. Its money is away while it is withdrawn."""

    __tablename__ = "disputes"
    __table_args__ = (
        CheckConstraint("amount_cents > 0", name="amount_positive"),
        Index(None, "organization_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[OrganizationId]
    topup_id: Mapped[str] = mapped_column(ForeignKey("topups.id"))
    amount_cents: Mapped[Int64]
    status: Mapped[str]
    """Stripe's word: `needs_response`, `won`, `lost`, `warning_…`."""
    is_withdrawn: Mapped[bool]
    is_reinstated: Mapped[bool]
    """It has come back for good."""
    is_freezing: Mapped[bool]
    """The organization may not spend because of this one."""
    created_at: Mapped[Int64]
    updated_at: Mapped[Int64]


class StripeEvent(Base):
    """The inbox: which object changed. What it says is not kept; the object itself is asked."""

    __tablename__ = "stripe_events"
    __table_args__ = (
        Index(
            "ix_stripe_events_due",
            "next_attempt_at",
            sqlite_where=_IS_UNPROCESSED,
            postgresql_where=_IS_UNPROCESSED,
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str]
    object_id: Mapped[str]
    received_at: Mapped[Int64]
    next_attempt_at: Mapped[Int64]
    attempts: Mapped[int]
    processed_at: Mapped[Int64 | None]
    error: Mapped[str | None]


class SweepMark(Base):
    """How far a sweep has come, so that the next one starts there."""

    __tablename__ = "sweep_marks"

    name: Mapped[str] = mapped_column(primary_key=True)
    done_until: Mapped[Int64]


class BalanceAlert(Base):
    """When and how an organization is told that its credit runs low."""

    __tablename__ = "balance_alerts"
    __table_args__ = (CheckConstraint("threshold_nano_usd >= 0", name="threshold_not_negative"),)

    organization_id: Mapped[OrganizationId] = mapped_column(primary_key=True)
    threshold_nano_usd: Mapped[Int64]
    webhook_url: Mapped[str | None]
    is_low: Mapped[bool]
    """It has been told; the next time is after the balance was above in between."""
    times_told: Mapped[int]
