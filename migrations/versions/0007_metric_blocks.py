"""Metrics in blocks

One row holds the points of many series and steps; rollups lie beside it. The points of the chunks
that there are become blocks, one for each batch and set of steps.
"""

import hashlib
import math
import zlib
from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
_IDENTITY = sa.Identity(always=True)
_BYTES = sa.LargeBinary()
_FINAL = "tier = 100"
# The bytes of blocks as they were when this migration was written.
_BAND_BYTES = 1 << 16
_STATS = np.dtype([("first", "<i8"), ("last", "<i8"), ("value", "<f8"), ("count", "<u4")])
_DIRECTORY = np.dtype([("columns", "<u4"), ("size", "<u4")])


def upgrade() -> None:
    op.rename_table("metric_series", "old_series")
    op.rename_table("metric_chunks", "old_chunks")
    for kind, table in (("pk", "series"), ("pk", "chunks")):
        op.execute(f"ALTER INDEX {kind}_metric_{table} RENAME TO {kind}_old_{table}")
    _create_tables()
    _convert_up()
    op.drop_table("old_chunks")
    op.drop_table("old_series")


def downgrade() -> None:
    op.rename_table("metric_series", "new_series")
    op.execute("ALTER INDEX pk_metric_series RENAME TO pk_new_series")
    op.create_table(
        "metric_series",
        sa.Column("id", _BIG, _IDENTITY, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_metric_series_job_id_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric_series"),
        sa.UniqueConstraint(
            "job_id", "name", "attempt", name="uq_metric_series_job_id_name_attempt"
        ),
    )
    op.create_table(
        "metric_chunks",
        sa.Column("series_id", _BIG, nullable=False),
        sa.Column("seq", _BIG, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("steps", postgresql.ARRAY(_BIG), nullable=False),
        sa.Column("values", postgresql.ARRAY(sa.Double()), nullable=False),
        sa.ForeignKeyConstraint(
            ["series_id"],
            ["metric_series.id"],
            name="fk_metric_chunks_series_id_metric_series",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("series_id", "seq", name="pk_metric_chunks"),
    )
    op.create_index("ix_metric_chunks_job", "metric_chunks", ["job_id", "seq"])
    _convert_down()
    op.drop_table("metric_rollups")
    op.drop_table("metric_blocks")
    op.drop_table("new_series")
    op.drop_table("metric_layouts")


def _create_tables() -> None:
    op.create_table(
        "metric_layouts",
        sa.Column("id", _BIG, _IDENTITY, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("digest", _BYTES, nullable=False),
        sa.Column("names", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_metric_layouts_job_id_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric_layouts"),
        sa.UniqueConstraint("job_id", "digest", name="uq_metric_layouts_job_id_digest"),
    )
    op.create_table(
        "metric_series",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("layout_id", _BIG, nullable=False),
        sa.Column("first_step", _BIG, nullable=False),
        sa.Column("last_step", _BIG, nullable=False),
        sa.Column("last_value", sa.Double(), nullable=False),
        sa.Column("points", _BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["layout_id"],
            ["metric_layouts.id"],
            name="fk_metric_series_layout_id_metric_layouts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "name", "attempt", name="pk_metric_series"),
    )
    op.create_index("ix_metric_series_layout", "metric_series", ["layout_id"])
    op.create_table(
        "metric_blocks",
        sa.Column("id", _BIG, _IDENTITY, nullable=False),
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
        sa.Column("data", _BYTES, nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.ForeignKeyConstraint(
            ["layout_id"],
            ["metric_layouts.id"],
            name="fk_metric_blocks_layout_id_metric_layouts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric_blocks"),
    )
    op.create_index("ix_metric_blocks_job", "metric_blocks", ["job_id", "last_seq"])
    op.create_index("ix_metric_blocks_layout", "metric_blocks", ["layout_id"])
    op.create_index(
        "ix_metric_blocks_open",
        "metric_blocks",
        ["job_id", "attempt", "last_seq"],
        postgresql_where=sa.text("tier < 100"),
    )
    op.create_index(
        "ix_metric_blocks_raw",
        "metric_blocks",
        ["created_at"],
        postgresql_where=sa.text(f"{_FINAL} AND data IS NOT NULL"),
    )
    op.create_index(
        "ix_metric_blocks_age", "metric_blocks", ["created_at"], postgresql_where=sa.text(_FINAL)
    )
    op.create_table(
        "metric_rollups",
        sa.Column("block_id", _BIG, nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("buckets", sa.Integer(), nullable=False),
        sa.Column("row_data", _BYTES, nullable=False),
        sa.Column("places", _BYTES, nullable=True),
        sa.Column("data", _BYTES, nullable=False),
        sa.ForeignKeyConstraint(
            ["block_id"],
            ["metric_blocks.id"],
            name="fk_metric_rollups_block_id_metric_blocks",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("block_id", "level", name="pk_metric_rollups"),
    )
    # What is compressed already is not compressed again, and can be read in part.
    for table, columns in {
        "metric_blocks": ("row_data", "stats", "directory", "data"),
        "metric_rollups": ("row_data", "places", "data"),
    }.items():
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _convert_up() -> None:
    bind = op.get_bind()
    chunks = sa.text(
        'SELECT s.job_id, s.attempt, c.seq, s.name, c.steps, c."values" '
        "FROM old_chunks c JOIN old_series s ON s.id = c.series_id "
        "ORDER BY s.job_id, s.attempt, c.seq, s.name"
    )
    add = sa.text(
        "INSERT INTO metric_blocks (job_id, attempt, layout_id, tier, first_seq, last_seq, "
        "first_step, last_step, rows, points, masked, row_data, stats, directory, data) VALUES "
        "(:job_id, :attempt, :layout_id, 0, :seq, :seq, :first_step, :last_step, :rows, :points, "
        "false, :row_data, :stats, :directory, :data)"
    )
    rows = bind.execute(chunks.execution_options(yield_per=1000))
    for (job_id, attempt, seq), batch in groupby(rows, key=lambda r: (r[0], r[1], r[2])):
        by_steps: dict[tuple[int, ...], dict[str, list[float]]] = {}
        for row in batch:
            by_steps.setdefault(tuple(row[4]), {})[row[3]] = row[5]
        for steps, columns in by_steps.items():
            if steps:
                layout_id = _layout(bind, job_id, list(columns))
                block = _block(steps, seq, list(columns.values()))
                key = {"job_id": job_id, "attempt": attempt, "layout_id": layout_id, "seq": seq}
                bind.execute(add, key | block)


def _layout(bind: Any, job_id: str, names: list[str]) -> int:
    key = {"job_id": job_id, "digest": hashlib.sha256("\0".join(names).encode()).digest()}
    found = bind.scalar(
        sa.text("SELECT id FROM metric_layouts WHERE job_id = :job_id AND digest = :digest"), key
    )
    if found is None:
        found = bind.scalar(
            sa.text(
                "INSERT INTO metric_layouts (job_id, digest, names) "
                "VALUES (:job_id, :digest, :names) RETURNING id"
            ),
            key | {"names": names},
        )
    return int(found)


def _shuffle(values: Any) -> bytes:
    return bytes(np.ascontiguousarray(values).view(np.uint8).reshape(-1, 8).T.tobytes())


def _block(steps: tuple[int, ...], seq: int, columns: list[list[float]]) -> dict[str, Any]:
    values = np.array(columns, dtype="<f8")
    count = len(steps)
    at = np.array(steps, dtype="<i8")
    fixed = [at, np.full(count, seq, dtype="<i8"), np.full(count, -1, dtype="<i8")]
    rows = b"".join(_shuffle(np.diff(part, prepend=0)) for part in fixed)
    rows += _shuffle(np.full(count, math.nan))
    width = max(_BAND_BYTES // (count * 8), 1)
    parts = [values[n : n + width] for n in range(0, len(values), width)]
    bands = [zlib.compress(_shuffle(part.reshape(-1)), 1) for part in parts]
    sizes = [(len(part), len(band)) for part, band in zip(parts, bands, strict=True)]
    stats = np.zeros(len(values), dtype=_STATS)
    stats["first"], stats["last"], stats["count"] = at.min(), at.max(), count
    stats["value"] = values[:, -1]
    return {
        "first_step": int(at.min()),
        "last_step": int(at.max()),
        "rows": count,
        "points": values.size,
        "row_data": zlib.compress(rows, 1),
        "stats": stats.tobytes(),
        "directory": np.array(sizes, dtype=_DIRECTORY).tobytes(),
        "data": b"".join(bands),
    }


def _convert_down() -> None:
    """The points come back as chunks; those of which only rollups were kept do not."""
    bind = op.get_bind()
    blocks = sa.text(
        "SELECT b.id, b.job_id, b.attempt, b.rows, b.masked, b.row_data, b.directory, b.data, "
        "l.names FROM metric_blocks b JOIN metric_layouts l ON l.id = b.layout_id "
        "WHERE b.data IS NOT NULL ORDER BY b.last_seq, b.id"
    )
    add_series = sa.text(
        "INSERT INTO metric_series (job_id, name, attempt) VALUES (:job_id, :name, :attempt) "
        "ON CONFLICT (job_id, name, attempt) DO UPDATE SET name = excluded.name RETURNING id"
    )
    add_chunk = sa.text(
        'INSERT INTO metric_chunks (series_id, seq, job_id, steps, "values") '
        "VALUES (:series_id, :seq, :job_id, :steps, :values) "
        "ON CONFLICT (series_id, seq) DO UPDATE SET "
        "steps = metric_chunks.steps || excluded.steps, "
        '"values" = metric_chunks."values" || excluded."values"'
    )
    for block in bind.execute(blocks.execution_options(yield_per=1)):
        for name, seq, steps, values in _chunks(block):
            key = {"job_id": block.job_id, "name": name, "attempt": block.attempt}
            series_id = bind.scalar(add_series, key)
            bind.execute(
                add_chunk,
                {
                    "series_id": series_id,
                    "seq": seq,
                    "job_id": block.job_id,
                    "steps": steps,
                    "values": values,
                },
            )


def _unshuffle(data: bytes, dtype: str) -> Any:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(8, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def _chunks(block: Any) -> Iterator[tuple[str, int, list[int], list[float]]]:
    size = block.rows * 8
    plain = zlib.decompress(block.row_data)
    steps = np.cumsum(_unshuffle(plain[:size], "<i8"))
    seqs = np.cumsum(_unshuffle(plain[size : 2 * size], "<i8"))
    names = iter(block.names)
    begin = 0
    for columns, length in np.frombuffer(block.directory, dtype=_DIRECTORY).tolist():
        band = zlib.decompress(block.data[begin : begin + length])
        begin += length
        bits = columns * -(-block.rows // 8) if block.masked else 0
        present = np.ones((columns, block.rows), dtype=bool)
        if block.masked:
            packed = np.frombuffer(band, dtype=np.uint8, count=bits).reshape(columns, -1)
            present = np.unpackbits(packed, axis=1, count=block.rows, bitorder="little") > 0
        values = array("d", _unshuffle(band[bits:], "<f8").tobytes())
        place = 0
        for column in range(columns):
            name = next(names)
            where = np.flatnonzero(present[column])
            for seq in np.unique(seqs[where]).tolist():
                rows = where[seqs[where] == seq]
                part = values[place : place + len(rows)]
                place += len(rows)
                yield name, seq, steps[rows].tolist(), part.tolist()
