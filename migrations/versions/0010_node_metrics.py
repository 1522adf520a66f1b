"""Metrics of nodes

Samples of GPUs and hosts, and when the GPUs of an attempt were last seen at work.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "node_samples",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("host", postgresql.JSONB(), nullable=False),
        sa.Column("gpus", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name="fk_node_samples_node_id_nodes", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node_id", "id", name="pk_node_samples"),
    )
    op.create_index("ix_node_samples_time", "node_samples", ["node_id", "time"])
    op.create_table(
        "gpu_activity",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("seen_at", _TIME, nullable=False),
        sa.Column("busy_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"],
            ["attempts.id"],
            name="fk_gpu_activity_attempt_id_attempts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_gpu_activity"),
    )


def downgrade() -> None:
    op.drop_table("gpu_activity")
    op.drop_index("ix_node_samples_time", table_name="node_samples")
    op.drop_table("node_samples")
