"""Data sets

Uploads in parts, their checks, and the data sets that come of them.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "datasets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("media", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("columns", postgresql.JSONB(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("rows", sa.BigInteger(), nullable=True),
        sa.Column("problem_count", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column(
            "problems", postgresql.JSONB(), nullable=False, server_default=sa.text("'[]'::jsonb")
        ),
        sa.Column("created_at", _TIME, nullable=False, server_default=sa.func.now()),
        sa.Column("updated_at", _TIME, nullable=False, server_default=sa.func.now()),
        sa.Column("checked_at", _TIME, nullable=True),
        sa.Column("claimed_until", _TIME, nullable=True),
        sa.Column("deleted_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
    )
    op.create_index("ix_datasets_owner", "datasets", ["owner", "created_at", "id"])
    op.create_index("ix_datasets_created", "datasets", ["created_at", "id"])
    op.create_index(
        "ix_datasets_status",
        "datasets",
        ["status", "updated_at"],
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index(
        "ix_datasets_deleted",
        "datasets",
        ["deleted_at"],
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_table(
        "dataset_parts",
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("first_byte", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("dataset_id", "first_byte", name=op.f("pk_dataset_parts")),
        sa.ForeignKeyConstraint(
            ["dataset_id"],
            ["datasets.id"],
            ondelete="CASCADE",
            name=op.f("fk_dataset_parts_dataset_id_datasets"),
        ),
    )


def downgrade() -> None:
    op.drop_table("dataset_parts")
    op.drop_table("datasets")
