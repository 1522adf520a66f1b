"""Leftovers of artifact stores, and the metric of a checkpoint

Which checkpoints stay is decided over all attempts of a job; what goes is told to the nodes.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("artifacts", sa.Column("metric", sa.Double(), nullable=True))
    op.create_table(
        "leftovers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("store", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leftovers"),
        sa.UniqueConstraint("url", name="uq_leftovers_url"),
    )
    op.create_index("ix_leftovers_due", "leftovers", ["store", "not_before"])


def downgrade() -> None:
    op.drop_index("ix_leftovers_due", table_name="leftovers")
    op.drop_table("leftovers")
    op.drop_column("artifacts", "metric")
