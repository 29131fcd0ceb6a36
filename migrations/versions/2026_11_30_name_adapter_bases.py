"""An adapter is a model of its own that another one, its base, serves."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_name_adapter_bases"
down_revision = "2026_11_30_tell_kinds_of_models"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("hosted_models", sa.Column("base", sa.String(length=200), nullable=True))
    base = sa.Column("base", sa.String(length=200), nullable=False, server_default="")
    op.add_column("model_additions", base)
