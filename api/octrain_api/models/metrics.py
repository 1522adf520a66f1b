"""Metrics and logs: blocks of what trainers told."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base


class MetricLayout(Base):
    """The names of the columns of metric blocks, in their order."""

    __tablename__ = "metric_layouts"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    digest: Mapped[bytes]
    names: Mapped[list[str]]

    __table_args__ = (UniqueConstraint("job_id", "digest"),)


class MetricSeries(Base):
    """One metric of one attempt, as far as its batches have been joined: tier 1 and above.

    It belongs to a layout, not to the job, so that compacting takes no lock that a writer of the
    job's row waits for.
    """

    __tablename__ = "metric_series"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    layout_id: Mapped[int] = mapped_column(ForeignKey("metric_layouts.id", ondelete="CASCADE"))
    first_step: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)
    last_value: Mapped[float]
    points: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_metric_series_layout", "layout_id"),)


class _Matrix:
    """A matrix of points. What the bytes are is octrain_api.metrics.codec's."""

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str]
    attempt: Mapped[int]
    layout_id: Mapped[int] = mapped_column(ForeignKey("metric_layouts.id", ondelete="CASCADE"))
    first_seq: Mapped[int] = mapped_column(BigInteger)
    last_seq: Mapped[int] = mapped_column(BigInteger)
    first_step: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)
    rows: Mapped[int]
    points: Mapped[int] = mapped_column(BigInteger)
    masked: Mapped[bool]
    row_data: Mapped[bytes]
    stats: Mapped[bytes]
    directory: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class MetricBatch(_Matrix, Base):
    """A matrix that is still to be joined with others: one batch as it came (tier 0), or some.

    They live for minutes, in a table of their own: what they leave behind is room for the next
    ones, and never lies between the blocks that are kept.
    """

    __tablename__ = "metric_batches"

    tier: Mapped[int]
    data: Mapped[bytes]

    __table_args__ = (
        Index("ix_metric_batches_job", "job_id", "attempt", "last_seq"),
        Index("ix_metric_batches_layout", "layout_id"),
    )


class MetricBlock(_Matrix, Base):
    """A matrix that is never joined again, with rollups."""

    __tablename__ = "metric_blocks"

    # None once the raw points are gone and only the rollups are kept.
    data: Mapped[bytes | None]

    __table_args__ = (
        Index("ix_metric_blocks_job", "job_id", "last_seq"),
        Index("ix_metric_blocks_layout", "layout_id"),
        Index("ix_metric_blocks_raw", "created_at", postgresql_where=text("data IS NOT NULL")),
        Index("ix_metric_blocks_age", "created_at"),
    )


class MetricRollup(Base):
    """The buckets of a block at one level: a width in steps."""

    __tablename__ = "metric_rollups"

    block_id: Mapped[int] = mapped_column(
        ForeignKey("metric_blocks.id", ondelete="CASCADE"), primary_key=True
    )
    level: Mapped[int] = mapped_column(primary_key=True)
    buckets: Mapped[int]
    # Of each bucket its key, and the time and tokens of its last row.
    row_data: Mapped[bytes]
    # Which place each column has in the data, -1 for none; None where all are there in order.
    places: Mapped[bytes | None]
    data: Mapped[bytes]


class LogChunk(Base):
    """The log lines of one telemetry batch, numbered `first_line`... per job.

    `size` is what the texts take, in bytes of UTF-8.
    """

    __tablename__ = "log_chunks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    first_line: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    last_line: Mapped[int] = mapped_column(BigInteger)
    seq: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    times: Mapped[list[float]] = mapped_column(ARRAY(Double))
    streams: Mapped[list[str]]
    # Level and rank of each line, null where it does not tell; empty for chunks of older versions.
    levels: Mapped[list[str | None]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    ranks: Mapped[list[int | None]] = mapped_column(ARRAY(Integer), server_default=text("'{}'"))
    texts: Mapped[list[str]]
    size: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        Index("ix_log_chunks_seq", "job_id", "seq"),
        Index("ix_log_chunks_last_line", "job_id", "last_line"),
        # The sizes beside: what all take together is summed up from the index alone.
        Index("ix_log_chunks_age", "created_at", postgresql_include=["size"]),
    )
