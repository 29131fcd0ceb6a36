"""What a hosted model answers with: text, vectors or scores."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_tell_kinds_of_models"
down_revision = "2026_11_30_add_model_additions"
branch_labels = None
depends_on = None


def upgrade() -> None:
    kind = sa.Column("kind", sa.String(length=16), nullable=False, server_default="generate")
    op.add_column("hosted_models", kind)
