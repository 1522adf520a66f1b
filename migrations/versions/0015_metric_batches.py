"""Metric batches, and the age and size of logs

Matrices that are still to be joined with others get a table of their own, so that what they leave
behind never lies between the blocks that are kept. Log chunks know when they came and what they
take, by which old ones can go.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
_BYTES = sa.LargeBinary()
_COLUMNS = (
    "tier, job_id, attempt, layout_id, first_seq, last_seq, first_step, last_step, rows, points, "
    "masked, row_data, stats, directory, data, created_at"
)
_MOVE = "INSERT INTO {} ({}) SELECT {} FROM {} {} ORDER BY id"
_OLD_INDEXES = {
    "ix_metric_blocks_raw": "tier = 100 AND data IS NOT NULL",
    "ix_metric_blocks_age": "tier = 100",
}
_NEW_INDEXES = {"ix_metric_blocks_raw": "data IS NOT NULL", "ix_metric_blocks_age": None}


def upgrade() -> None:
    _create_batches()
    some = "WHERE tier < 100"
    op.execute(_MOVE.format("metric_batches", _COLUMNS, _COLUMNS, "metric_blocks", some))
    op.execute("DELETE FROM metric_blocks WHERE tier < 100")
    _index_blocks(_NEW_INDEXES)
    op.drop_index("ix_metric_blocks_open", "metric_blocks")
    op.drop_column("metric_blocks", "tier")
    op.add_column("log_chunks", sa.Column("size", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE log_chunks SET size = octet_length(array_to_string(texts, ''))")
    op.alter_column("log_chunks", "size", server_default=None)
    # Logs that are there count as of today: nobody knows better.
    op.add_column(
        "log_chunks",
        sa.Column(
            "created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
    )
    op.create_index("ix_log_chunks_age", "log_chunks", ["created_at"], postgresql_include=["size"])


def downgrade() -> None:
    op.drop_index("ix_log_chunks_age", "log_chunks")
    op.drop_column("log_chunks", "created_at")
    op.drop_column("log_chunks", "size")
    op.add_column(
        "metric_blocks", sa.Column("tier", sa.Integer(), nullable=False, server_default="100")
    )
    op.alter_column("metric_blocks", "tier", server_default=None)
    op.create_index(
        "ix_metric_blocks_open",
        "metric_blocks",
        ["job_id", "attempt", "last_seq"],
        postgresql_where=sa.text("tier < 100"),
    )
    _index_blocks(_OLD_INDEXES)
    op.execute(_MOVE.format("metric_blocks", _COLUMNS, _COLUMNS, "metric_batches", ""))
    op.drop_table("metric_batches")


def _create_batches() -> None:
    op.create_table(
        "metric_batches",
        sa.Column("id", _BIG, sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("layout_id", _BIG, nullable=False),
        sa.Column("tier", sa.Integer(), nullable=False),
        sa.Column("first_seq", _BIG, nullable=False),
        sa.Column("last_seq", _BIG, nullable=False),
        sa.Column("first_step", _BIG, nullable=False),
        sa.Column("last_step", _BIG, nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("points", _BIG, nullable=False),
        sa.Column("masked", sa.Boolean(), nullable=False),
        sa.Column("row_data", _BYTES, nullable=False),
        sa.Column("stats", _BYTES, nullable=False),
        sa.Column("directory", _BYTES, nullable=False),
        sa.Column("data", _BYTES, nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.ForeignKeyConstraint(
            ["layout_id"],
            ["metric_layouts.id"],
            name="fk_metric_batches_layout_id_metric_layouts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric_batches"),
    )
    op.create_index("ix_metric_batches_job", "metric_batches", ["job_id", "attempt", "last_seq"])
    op.create_index("ix_metric_batches_layout", "metric_batches", ["layout_id"])
    # What is compressed already is not compressed again, and can be read in part.
    for column in ("row_data", "stats", "directory", "data"):
        op.execute(f"ALTER TABLE metric_batches ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _index_blocks(wanted: dict[str, str | None]) -> None:
    for name, where in wanted.items():
        op.drop_index(name, "metric_blocks")
        op.create_index(
            name,
            "metric_blocks",
            ["created_at"],
            postgresql_where=sa.text(where) if where is not None else None,
        )
