"""CPU slots of attempts

An attempt knows how many CPU slots it holds, as it knows its GPUs: what nodes have in use is read
from the live attempts alone, without their jobs.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "attempts", sa.Column("cpu_slots", sa.Integer(), nullable=False, server_default="0")
    )
    # Those that have ended hold nothing, and may be many.
    op.execute(
        "UPDATE attempts SET cpu_slots = CAST(split_part(jobs.need, ':', 2) AS int) FROM jobs "
        "WHERE jobs.id = attempts.job_id AND attempts.device = 'cpu' AND attempts.status <> 'ended'"
    )


def downgrade() -> None:
    op.drop_column("attempts", "cpu_slots")
