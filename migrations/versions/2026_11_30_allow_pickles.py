"""An operator may allow that a model's weights are read from pickles."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_allow_pickles"
down_revision = "2026_11_30_count_drafts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "model_additions",
        sa.Column("allows_pickles", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
