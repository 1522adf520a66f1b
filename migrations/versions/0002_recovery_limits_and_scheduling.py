"""Recovery, limits and scheduling

Restarts are paced, runs and waits are limited, stalls are noted, checkpoints can be known to be
damaged, nodes can be set aside, and the queue is grouped by what its jobs need of a node.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_QUEUED = sa.text("status = 'queued'")
_OUTBOX_ATTEMPT = "fk_outbox_attempt_id_attempts"
_ENDED = sa.text("status = 'ended'")


def upgrade() -> None:
    op.alter_column("jobs", "cancel_deadline_at", new_column_name="stop_deadline_at")
    op.drop_column("jobs", "waiting_for")
    op.add_column("jobs", sa.Column("next_attempt_at", _TIME, nullable=True))
    op.add_column("jobs", sa.Column("queue_deadline_at", _TIME, nullable=True))
    op.add_column("jobs", sa.Column("need", sa.Text(), nullable=False, server_default=""))
    # device:gpus:engine, and the node when only it reaches the job's newest checkpoint.
    op.execute(
        """
        UPDATE jobs SET need = concat_ws(
            ':', spec->'resources'->>'device', spec->'resources'->>'gpus', spec->'recipe'->>'engine'
        ) || coalesce((
            SELECT '@' || n.id
            FROM artifacts r JOIN attempts a ON a.id = r.attempt_id JOIN nodes n ON n.id = a.node_id
            WHERE r.job_id = jobs.id AND r.kind = 'checkpoint' AND n.private_roots
            ORDER BY r.step DESC, r.created_at DESC LIMIT 1
        ), '')
        """
    )
    op.alter_column("jobs", "need", server_default=None)
    op.create_index(
        "ix_jobs_queue_need",
        "jobs",
        ["need", sa.text("priority DESC"), "created_at", "id"],
        postgresql_where=_QUEUED,
    )
    op.create_index(
        "ix_jobs_queue_deadline", "jobs", ["queue_deadline_at"], postgresql_where=_QUEUED
    )
    op.add_column("attempts", sa.Column("progress_at", _TIME, nullable=True))
    op.add_column("attempts", sa.Column("stalled_since", _TIME, nullable=True))
    op.add_column("attempts", sa.Column("stall_seconds", sa.Integer(), nullable=True))
    op.add_column("attempts", sa.Column("run_deadline_at", _TIME, nullable=True))
    op.add_column("attempts", sa.Column("outage_at", _TIME, nullable=True))
    # A running attempt has made progress at the latest now: no stall dates from before.
    op.execute("UPDATE attempts SET progress_at = now() WHERE status = 'running'")
    op.create_index(
        "ix_attempts_ended_node", "attempts", ["node_id", "ended_at"], postgresql_where=_ENDED
    )
    op.add_column(
        "artifacts", sa.Column("damaged", sa.Boolean(), nullable=False, server_default="false")
    )
    op.add_column(
        "nodes", sa.Column("described_at", _TIME, nullable=False, server_default=sa.func.now())
    )
    op.add_column("nodes", sa.Column("quarantined_since", _TIME, nullable=True))
    op.add_column("nodes", sa.Column("quarantine_detail", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("faults_from", _TIME, nullable=True))
    op.drop_constraint(_OUTBOX_ATTEMPT, "outbox", type_="foreignkey")
    op.create_table(
        "queue_groups",
        sa.Column("need", sa.Text(), nullable=False),
        sa.Column("waiting_for", sa.Text(), nullable=False),
        sa.Column("as_of", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("need", name=op.f("pk_queue_groups")),
    )


def downgrade() -> None:
    op.drop_table("queue_groups")
    op.create_foreign_key(
        _OUTBOX_ATTEMPT, "outbox", "attempts", ["attempt_id"], ["id"], ondelete="CASCADE"
    )
    for column in ("faults_from", "quarantine_detail", "quarantined_since", "described_at"):
        op.drop_column("nodes", column)
    op.drop_column("artifacts", "damaged")
    op.drop_index("ix_attempts_ended_node", table_name="attempts", postgresql_where=_ENDED)
    for column in (
        "outage_at",
        "run_deadline_at",
        "stall_seconds",
        "stalled_since",
        "progress_at",
    ):
        op.drop_column("attempts", column)
    op.drop_index("ix_jobs_queue_deadline", table_name="jobs", postgresql_where=_QUEUED)
    op.drop_index("ix_jobs_queue_need", table_name="jobs", postgresql_where=_QUEUED)
    for column in ("need", "queue_deadline_at", "next_attempt_at"):
        op.drop_column("jobs", column)
    op.add_column("jobs", sa.Column("waiting_for", sa.Text(), nullable=True))
    op.execute("UPDATE jobs SET waiting_for = 'the scheduler' WHERE status = 'queued'")
    op.alter_column("jobs", "stop_deadline_at", new_column_name="cancel_deadline_at")
