"""How many tokens were guessed ahead for each request, and how many of them came true."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_count_drafts"
down_revision = "2026_11_30_name_adapter_bases"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("draft_tokens", sa.Integer(), nullable=True))
    op.add_column("usage_records", sa.Column("accepted_draft_tokens", sa.Integer(), nullable=True))
