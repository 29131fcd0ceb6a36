"""Budgets of keys and projects, and the index that finds what a key holds."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_bound_by_budgets"
down_revision = "2026_11_30_take_payments"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("organization_id", sa.String(), nullable=False),
        sa.Column("api_key_id", sa.String(), nullable=True),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("limit_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(api_key_id IS NULL) <> (project_id IS NULL)", name=op.f("ck_budgets_one_scope")
        ),
        sa.CheckConstraint("limit_nano_usd >= 0", name=op.f("ck_budgets_limit_not_negative")),
        sa.CheckConstraint("period IN ('day', 'month', 'total')", name=op.f("ck_budgets_period")),
        sa.ForeignKeyConstraint(
            ["organization_id"],
            ["organizations.id"],
            name=op.f("fk_budgets_organization_id_organizations"),
        ),
        sa.ForeignKeyConstraint(
            ["api_key_id"], ["api_keys.id"], name=op.f("fk_budgets_api_key_id_api_keys")
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_budgets_project_id_projects")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
        sa.UniqueConstraint("api_key_id", name=op.f("uq_budgets_api_key_id")),
        sa.UniqueConstraint("project_id", name=op.f("uq_budgets_project_id")),
    )
    op.create_index(op.f("ix_budgets_organization_id"), "budgets", ["organization_id"])
    op.create_index(
        "ix_holds_open_of_key",
        "holds",
        ["api_key_id"],
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger is append-only: restore a backup instead")
