"""Plans

What a spec takes, as nodes work it out for those who ask before they submit.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "plan_requests",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("spec", JSONB(), nullable=False),
        sa.Column("status", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("result", JSONB(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("asked_at", _TIME, server_default=sa.func.now(), nullable=False),
        sa.Column("taken_at", _TIME, nullable=True),
        sa.Column("answered_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("key", name="pk_plan_requests"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_plan_requests_node_id_nodes"),
    )
    op.create_index(
        "ix_plan_requests_open",
        "plan_requests",
        ["asked_at"],
        postgresql_where=sa.text("answered_at IS NULL"),
    )
    op.create_index("ix_plan_requests_answered", "plan_requests", ["answered_at"])


def downgrade() -> None:
    op.drop_table("plan_requests")
