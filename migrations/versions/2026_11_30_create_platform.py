"""Accounts, money, catalogue and outbox, with the rules that the database itself keeps."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_create_platform"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY = (
    "prices",
    "ledger_transactions",
    "ledger_entries",
    "lot_uses",
    "usage_records",
    "audit_events",
)

REFUSE_CHANGE = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""

REQUIRE_BALANCE = """
CREATE FUNCTION require_balance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT sum(amount_nano_usd) FROM ledger_entries
        WHERE transaction_id = NEW.transaction_id) <> 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not sum to zero', NEW.transaction_id
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=True),
        sa.Column("user_id", sa.String(), nullable=True),
        sa.Column("api_key_id", sa.String(), nullable=True),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=True),
        sa.Column("address", sa.String(), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_index(
        op.f("ix_audit_events_organization_id_created_at"),
        "audit_events",
        ["organization_id", "created_at"],
    )

    op.create_table(
        "gateways",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("lease_until", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )
    op.create_table(
        "hosted_models",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("path", sa.String(length=4096), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("architecture", sa.String(length=128), nullable=False),
        sa.Column("context_length", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        sa.Column("description", sa.String(length=1000), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('live', 'draining', 'removed')", name=op.f("ck_hosted_models_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_hosted_models")),
        sa.UniqueConstraint("name", name=op.f("uq_hosted_models_name")),
    )
    op.create_table(
        "model_requests",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=True),
        sa.Column("email", sa.String(length=320), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("reason", sa.String(length=2000), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "status IN ('open', 'hosted', 'declined')", name=op.f("ck_model_requests_status")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_requests")),
    )
    op.create_index(
        op.f("ix_model_requests_organization_id_created_at"),
        "model_requests",
        ["organization_id", "created_at"],
    )

    op.create_table(
        "organizations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "status IN ('active', 'frozen', 'closed')", name=op.f("ck_organizations_status")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organizations")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("topic", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger(), nullable=False),
        sa.Column("done_at", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("key", name=op.f("uq_outbox_key")),
    )
    op.create_index(
        "ix_outbox_due",
        "outbox",
        ["next_attempt_at"],
        sqlite_where=sa.text("done_at IS NULL"),
        postgresql_where=sa.text("done_at IS NULL"),
    )

    op.create_table(
        "prices",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("valid_from", sa.BigInteger(), nullable=False),
        sa.Column("input_nano_usd_per_million", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_nano_usd_per_million", sa.BigInteger(), nullable=False),
        sa.Column("output_nano_usd_per_million", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "cached_input_nano_usd_per_million <= input_nano_usd_per_million",
            name=op.f("ck_prices_cached_not_dearer"),
        ),
        sa.CheckConstraint(
            "input_nano_usd_per_million >= 0 AND cached_input_nano_usd_per_million >= 0"
            " AND output_nano_usd_per_million >= 0",
            name=op.f("ck_prices_not_negative"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
        sa.UniqueConstraint("model", "valid_from", name=op.f("uq_prices_model_valid_from")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("email_canonical", sa.String(), nullable=False),
        sa.Column("password_hash", sa.String(), nullable=False),
        sa.Column("email_verified_at", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'disabled')", name=op.f("ck_users_status")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email_canonical", name=op.f("uq_users_email_canonical")),
    )
    op.create_table(
        "balances",
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("posted_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("held_nano_usd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("held_nano_usd >= 0", name=op.f("ck_balances_held_not_negative")),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_balances_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("organization_id", name=op.f("pk_balances")),
    )
    op.create_table(
        "email_tokens",
        sa.Column("token_hash", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_email_tokens_user_id_users")
        ),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_email_tokens")),
    )
    op.create_index(op.f("ix_email_tokens_expires_at"), "email_tokens", ["expires_at"])
    op.create_index(op.f("ix_email_tokens_user_id"), "email_tokens", ["user_id"])

    op.create_table(
        "grant_claims",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject_hash", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_grant_claims_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("kind", "subject_hash", name=op.f("pk_grant_claims")),
    )
    op.create_table(
        "ledger_transactions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("memo", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_ledger_transactions_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_transactions")),
        sa.UniqueConstraint("key", name=op.f("uq_ledger_transactions_key")),
    )
    op.create_index(
        op.f("ix_ledger_transactions_organization_id_created_at"),
        "ledger_transactions",
        ["organization_id", "created_at"],
    )

    op.create_table(
        "memberships",
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'member')", name=op.f("ck_memberships_role")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_memberships_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_memberships_user_id_users")
        ),
        sa.PrimaryKeyConstraint("organization_id", "user_id", name=op.f("pk_memberships")),
    )
    op.create_index(op.f("ix_memberships_user_id"), "memberships", ["user_id"])

    op.create_table(
        "projects",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_projects_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
    )
    op.create_index(op.f("ix_projects_organization_id"), "projects", ["organization_id"])

    op.create_table(
        "sessions",
        sa.Column("id_hash", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("csrf_token", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_sessions_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_sessions_user_id_users")),
        sa.PrimaryKeyConstraint("id_hash", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"])
    op.create_index(op.f("ix_sessions_user_id"), "sessions", ["user_id"])

    op.create_table(
        "usage_hours",
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("api_key_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charge_nano_usd", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_usage_hours_organization_id_organizations"),
        ),
        sa.PrimaryKeyConstraint(
            "organization_id", "api_key_id", "model", "hour", name=op.f("pk_usage_hours")
        ),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("created_by", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("mac", sa.String(), nullable=False),
        sa.Column("pepper_version", sa.Integer(), nullable=False),
        sa.Column("last4", sa.String(), nullable=False),
        sa.Column("scopes", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["created_by"], ["users.id"], name=op.f("fk_api_keys_created_by_users")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_api_keys_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("mac", name=op.f("uq_api_keys_mac")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_keys_prefix")),
    )
    op.create_index(
        op.f("ix_api_keys_organization_id_created_at"),
        "api_keys",
        ["organization_id", "created_at"],
    )

    op.create_table(
        "credit_lots",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("remaining_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("transaction_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('promotional', 'goodwill', 'paid')", name=op.f("ck_credit_lots_kind")
        ),
        sa.CheckConstraint(
            "remaining_nano_usd >= 0 AND remaining_nano_usd <= amount_nano_usd",
            name=op.f("ck_credit_lots_remaining"),
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_credit_lots_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_credit_lots_transaction_id_ledger_transactions"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_lots")),
        sa.UniqueConstraint("transaction_id", name=op.f("uq_credit_lots_transaction_id")),
    )
    op.create_index(op.f("ix_credit_lots_organization_id"), "credit_lots", ["organization_id"])

    op.create_table(
        "ledger_entries",
        sa.Column("transaction_id", sa.String(), nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount_nano_usd <> 0", name=op.f("ck_ledger_entries_not_zero")),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_ledger_entries_transaction_id_ledger_transactions"),
        ),
        sa.PrimaryKeyConstraint("transaction_id", "line", name=op.f("pk_ledger_entries")),
    )
    op.create_index(op.f("ix_ledger_entries_account"), "ledger_entries", ["account"])

    op.create_table(
        "holds",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("api_key_id", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("price_id", sa.String(), nullable=False),
        sa.Column("gateway", sa.String(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("authorized_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("charge_nano_usd", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("closed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(state = 'open') = (charge_nano_usd IS NULL)", name=op.f("ck_holds_closed_has_charge")
        ),
        sa.CheckConstraint(
            "state <> 'voided' OR charge_nano_usd = 0", name=op.f("ck_holds_void_is_free")
        ),
        sa.CheckConstraint("state IN ('open', 'settled', 'voided')", name=op.f("ck_holds_state")),
        sa.CheckConstraint("amount_nano_usd >= 0", name=op.f("ck_holds_amount_not_negative")),
        sa.CheckConstraint(
            "charge_nano_usd >= 0 AND charge_nano_usd <= amount_nano_usd",
            name=op.f("ck_holds_charge_within"),
        ),
        sa.ForeignKeyConstraint(
            ["api_key_id"], ["api_keys.id"], name=op.f("fk_holds_api_key_id_api_keys")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_holds_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_holds_price_id_prices")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_holds")),
    )
    op.create_index(
        "ix_holds_open",
        "holds",
        ["gateway", "organization_id"],
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )

    op.create_table(
        "lot_uses",
        sa.Column("transaction_id", sa.String(), nullable=False),
        sa.Column("lot_id", sa.String(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount_nano_usd > 0", name=op.f("ck_lot_uses_positive")),
        sa.ForeignKeyConstraint(
            ["lot_id"], ["credit_lots.id"], name=op.f("fk_lot_uses_lot_id_credit_lots")
        ),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_lot_uses_transaction_id_ledger_transactions"),
        ),
        sa.PrimaryKeyConstraint("transaction_id", "lot_id", name=op.f("pk_lot_uses")),
    )
    op.create_index(op.f("ix_lot_uses_lot_id"), "lot_uses", ["lot_id"])

    op.create_table(
        "usage_records",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("api_key_id", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("price_id", sa.String(), nullable=False),
        sa.Column("uncached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charge_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("is_billable", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("is_streamed", sa.Boolean(), nullable=False),
        sa.Column("worker", sa.String(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("ttft_us", sa.BigInteger(), nullable=True),
        sa.Column("queued_us", sa.BigInteger(), nullable=True),
        sa.Column("prefill_us", sa.BigInteger(), nullable=True),
        sa.Column("decode_us", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "charge_nano_usd >= 0", name=op.f("ck_usage_records_charge_not_negative")
        ),
        sa.CheckConstraint(
            "is_billable OR charge_nano_usd = 0", name=op.f("ck_usage_records_free_if_not_billable")
        ),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_usage_records_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["price_id"], ["prices.id"], name=op.f("fk_usage_records_price_id_prices")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["holds.request_id"], name=op.f("fk_usage_records_request_id_holds")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_records")),
    )
    op.create_index(
        op.f("ix_usage_records_organization_id_created_at"),
        "usage_records",
        ["organization_id", "created_at"],
    )
    _create_rules()


def downgrade() -> None:
    raise NotImplementedError("the ledger is append-only: restore a backup instead")


def _create_rules() -> None:
    """What is written in the books stays as written; on PostgreSQL a commit must balance, too."""
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for verb in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_refuse_{verb.lower()} BEFORE {verb} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )
        return
    op.execute(REFUSE_CHANGE)
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_refuse_change BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
        )
    op.execute(REQUIRE_BALANCE)
    op.execute(
        "CREATE CONSTRAINT TRIGGER ledger_entries_balance AFTER INSERT ON ledger_entries "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION require_balance()"
    )
