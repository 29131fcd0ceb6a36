"""Top-ups, refunds, disputes, the inbox of Stripe's webhooks, and alerts on low balances."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_take_payments"
down_revision = "2026_11_30_create_platform"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stripe_events",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("object_id", sa.String(), nullable=False),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("processed_at", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_events")),
    )
    op.create_index(
        "ix_stripe_events_due",
        "stripe_events",
        ["next_attempt_at"],
        unique=False,
        sqlite_where=sa.text("processed_at IS NULL"),
        postgresql_where=sa.text("processed_at IS NULL"),
    )
    op.create_table(
        "sweep_marks",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("done_until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sweep_marks")),
    )
    op.create_table(
        "balance_alerts",
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("threshold_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("webhook_url", sa.String(), nullable=True),
        sa.Column("is_low", sa.Boolean(), nullable=False),
        sa.Column("times_told", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "threshold_nano_usd >= 0", name=op.f("ck_balance_alerts_threshold_not_negative")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_balance_alerts_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_balance_alerts")),
    )
    op.create_table(
        "payment_profiles",
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("customer_id", sa.String(), nullable=True),
        sa.Column("payment_method_id", sa.String(), nullable=True),
        sa.Column("card_label", sa.String(), nullable=True),
        sa.Column("is_recharge_on", sa.Boolean(), nullable=False),
        sa.Column("recharge_threshold_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("recharge_cents", sa.BigInteger(), nullable=False),
        sa.Column("recharge_month_cap_cents", sa.BigInteger(), nullable=False),
        sa.Column("failed_recharges", sa.Integer(), nullable=False),
        sa.Column("paused_because", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "recharge_threshold_nano_usd >= 0 AND recharge_cents > 0"
            " AND recharge_month_cap_cents >= recharge_cents",
            name=op.f("ck_payment_profiles_recharge_amounts"),
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_payment_profiles_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_payment_profiles")),
        sa.UniqueConstraint("customer_id", name=op.f("uq_payment_profiles_customer_id")),
    )
    op.create_table(
        "topups",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("payment_intent_id", sa.String(), nullable=True),
        sa.Column("receipt_url", sa.String(), nullable=True),
        sa.Column("failure", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('checkout', 'recharge')", name=op.f("ck_topups_kind")),
        sa.CheckConstraint(
            "state IN ('pending', 'processing', 'review', 'paid', 'failed', 'expired')",
            name=op.f("ck_topups_state"),
        ),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_topups_amount_positive")),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_topups_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_topups")),
        sa.UniqueConstraint(
            "organization_id",
            "idempotency_key",
            name=op.f("uq_topups_organization_id_idempotency_key"),
        ),
        sa.UniqueConstraint("payment_intent_id", name=op.f("uq_topups_payment_intent_id")),
        sa.UniqueConstraint("session_id", name=op.f("uq_topups_session_id")),
    )
    op.create_index(
        op.f("ix_topups_organization_id_created_at"),
        "topups",
        ["organization_id", "created_at"],
        unique=False,
    )
    op.create_index(
        "uq_topups_open_recharge",
        "topups",
        ["organization_id"],
        unique=True,
        sqlite_where=sa.text("kind = 'recharge' AND state IN ('pending', 'processing', 'review')"),
        postgresql_where=sa.text(
            "kind = 'recharge' AND state IN ('pending', 'processing', 'review')"
        ),
    )
    op.create_table(
        "disputes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("topup_id", sa.String(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("is_withdrawn", sa.Boolean(), nullable=False),
        sa.Column("is_reinstated", sa.Boolean(), nullable=False),
        sa.Column("is_freezing", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_disputes_amount_positive")),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_disputes_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["topup_id"], ["topups.id"], name=op.f("fk_disputes_topup_id_topups")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_disputes")),
    )
    op.create_index(
        op.f("ix_disputes_organization_id"), "disputes", ["organization_id"], unique=False
    )
    op.create_table(
        "refunds",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("topup_id", sa.String(), nullable=False),
        sa.Column("stripe_refund_id", sa.String(), nullable=True),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('requested', 'taken', 'failed')", name=op.f("ck_refunds_state")
        ),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_refunds_amount_positive")),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_refunds_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["topup_id"], ["topups.id"], name=op.f("fk_refunds_topup_id_topups")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refunds")),
        sa.UniqueConstraint("stripe_refund_id", name=op.f("uq_refunds_stripe_refund_id")),
    )
    op.create_index(
        op.f("ix_refunds_organization_id_created_at"),
        "refunds",
        ["organization_id", "created_at"],
        unique=False,
    )
    op.create_index(op.f("ix_refunds_topup_id"), "refunds", ["topup_id"], unique=False)


def downgrade() -> None:
    raise NotImplementedError("the ledger is append-only: restore a backup instead")
