"""Data sets that owners uploaded."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class Dataset(Base):
    """A file of a user, uploaded in parts, checked, and then never changed."""

    __tablename__ = "datasets"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    media: Mapped[str]
    format: Mapped[str]
    columns: Mapped[Json]
    # What was announced; `received` bytes of it are stored.
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    status: Mapped[str]
    received: Mapped[int] = mapped_column(BigInteger, server_default="0")
    rows: Mapped[int | None] = mapped_column(BigInteger)
    problem_count: Mapped[int] = mapped_column(BigInteger, server_default="0")
    problems: Mapped[list[Json]] = mapped_column(JSONB, server_default=text("'[]'::jsonb"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    checked_at: Mapped[datetime | None]
    # A controller checks it; one that died leaves it to be checked anew at this time.
    claimed_until: Mapped[datetime | None]
    # Its files are to be removed, and then this row.
    deleted_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_datasets_owner", "owner", "created_at", "id"),
        Index("ix_datasets_created", "created_at", "id"),
        Index(
            "ix_datasets_status",
            "status",
            "updated_at",
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index(
            "ix_datasets_deleted",
            "deleted_at",
            postgresql_where=text("deleted_at IS NOT NULL"),
        ),
    )


class DatasetPart(Base):
    """A part of an upload that lies in the store; gone when the whole content does."""

    __tablename__ = "dataset_parts"

    dataset_id: Mapped[str] = mapped_column(
        ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True
    )
    first_byte: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str]
