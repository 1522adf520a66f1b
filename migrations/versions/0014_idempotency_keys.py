"""Idempotency keys in a table of their own

They were columns of the jobs; now every route that makes something takes them. The requests of old
rows were hashed otherwise: one that is sent again is refused, and makes nothing twice.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_created", "idempotency_keys", ["created_at"])
    op.execute(
        "INSERT INTO idempotency_keys (owner, key, request_hash, target, created_at) "
        "SELECT owner, idempotency_key, idempotency_hash, id, created_at FROM jobs "
        "WHERE idempotency_key IS NOT NULL AND created_at > now() - interval '24 hours'"
    )
    op.drop_constraint(op.f("uq_jobs_owner_idempotency_key"), "jobs", type_="unique")
    op.drop_column("jobs", "idempotency_hash")
    op.drop_column("jobs", "idempotency_key")


def downgrade() -> None:
    op.add_column("jobs", sa.Column("idempotency_key", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("idempotency_hash", sa.Text(), nullable=True))
    op.create_unique_constraint(
        op.f("uq_jobs_owner_idempotency_key"), "jobs", ["owner", "idempotency_key"]
    )
    op.execute(
        "UPDATE jobs SET idempotency_key = k.key, idempotency_hash = k.request_hash "
        "FROM idempotency_keys k WHERE k.target = jobs.id AND k.owner = jobs.owner"
    )
    op.drop_table("idempotency_keys")
