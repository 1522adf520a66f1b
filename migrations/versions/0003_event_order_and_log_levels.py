"""Order of events across jobs, and what is told of a log line

Events carry the transaction that wrote them, which orders those of all jobs; log lines carry a
level and a rank; a job knows from which number on its stream can be told in full.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The rows that are there come before all others; no row is rewritten for it.
    op.add_column(
        "events", sa.Column("transaction_id", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.alter_column(
        "events", "transaction_id", server_default=sa.text("pg_current_xact_id()::text::bigint")
    )
    op.create_index("ix_events_order", "events", ["transaction_id", "job_id", "seq"])
    op.add_column(
        "log_chunks",
        sa.Column("levels", sa.ARRAY(sa.Text()), nullable=False, server_default="{}"),
    )
    op.add_column(
        "log_chunks",
        sa.Column("ranks", sa.ARRAY(sa.Integer()), nullable=False, server_default="{}"),
    )
    op.add_column(
        "jobs", sa.Column("stream_floor", sa.BigInteger(), nullable=False, server_default="0")
    )


def downgrade() -> None:
    op.drop_column("jobs", "stream_floor")
    op.drop_column("log_chunks", "ranks")
    op.drop_column("log_chunks", "levels")
    op.drop_index("ix_events_order", "events")
    op.drop_column("events", "transaction_id")
