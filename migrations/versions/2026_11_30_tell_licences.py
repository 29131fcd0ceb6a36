"""The catalogue knows under which licence each model is offered."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_tell_licences"
down_revision = "2026_11_30_allow_pickles"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "hosted_models",
        sa.Column("licence", sa.String(400), nullable=False, server_default=""),
    )
