"""Deleted jobs

A deleted job keeps its row, its attempts and its events as a trail, and nothing else.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    # What the older version cannot tell apart from a job, it must not show.
    op.execute("DELETE FROM jobs WHERE deleted_at IS NOT NULL")
    op.drop_column("jobs", "deleted_at")
