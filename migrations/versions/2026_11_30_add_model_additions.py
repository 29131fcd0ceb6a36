"""Models on their way into the catalogue."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_add_model_additions"
down_revision = "2026_11_30_add_fairness_receipts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_additions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("source", sa.String(4096), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("description", sa.String(1000), nullable=False),
        sa.Column("licence", sa.String(100), nullable=False),
        sa.Column("terms", sa.String(1000), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failed_step", sa.String(16), nullable=True),
        sa.Column("detail", sa.String(1000), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('waiting', 'fetching', 'checking', 'loading', 'testing', 'live', 'failed')",
            name=op.f("ck_model_additions_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_additions")),
    )
    op.create_index(op.f("ix_model_additions_created_at"), "model_additions", ["created_at"])


def downgrade() -> None:
    op.drop_table("model_additions")
