"""Files that attempts made, and what is left of them."""

from datetime import datetime

from sqlalchemy import BigInteger, Boolean, Double, ForeignKey, Index, UniqueConstraint, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class Artifact(Base):
    """Files that an attempt made, as its supervisor registered them."""

    __tablename__ = "artifacts"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    kind: Mapped[str]
    name: Mapped[str]
    step: Mapped[int | None] = mapped_column(BigInteger)
    best: Mapped[bool] = mapped_column(Boolean)
    # The evaluation loss at the step of a checkpoint, where it was evaluated.
    metric: Mapped[float | None] = mapped_column(Double)
    url: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    # A node found that the stored files are not these: nothing is resumed from it.
    damaged: Mapped[bool] = mapped_column(Boolean, server_default="false")
    files: Mapped[list[Json]] = mapped_column(JSONB)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        UniqueConstraint("attempt_id", "kind", "name"),
        Index("ix_artifacts_job", "job_id", "kind"),
    )


class Leftover(Base):
    """Files in an artifact store that a node is to remove: all below `url` that no artifact names.

    No foreign keys: what is left over outlives its job. `node_id` is set where only that node
    reaches the store.
    """

    __tablename__ = "leftovers"

    id: Mapped[str] = mapped_column(primary_key=True)
    store: Mapped[str]
    url: Mapped[str]
    node_id: Mapped[str | None]
    not_before: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint("url"),
        Index("ix_leftovers_due", "store", "not_before"),
    )
