"""How each request's wait was spent, beside its usage."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_add_fairness_receipts"
down_revision = "2026_11_30_bound_by_budgets"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("behind_own_us", sa.BigInteger(), nullable=True))
    op.add_column("usage_records", sa.Column("behind_others_us", sa.BigInteger(), nullable=True))
    op.add_column("usage_records", sa.Column("tenants_active", sa.Integer(), nullable=True))
