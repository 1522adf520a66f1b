"""The table of plans that were asked for."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class PlanRequest(Base):
    """What one spec takes, as a node works it out: `waiting`, `taken`, then `ready` or `failed`.

    `key` is the SHA-256 of everything that a plan depends on, and of the owner whose files it
    may read: the same question is answered once.
    """

    __tablename__ = "plan_requests"

    key: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    spec: Mapped[Json] = mapped_column(JSONB)
    status: Mapped[str] = mapped_column(server_default="waiting")
    result: Mapped[Json | None] = mapped_column(JSONB)
    problem: Mapped[str | None]
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.id"))
    asked_at: Mapped[datetime] = mapped_column(server_default=func.now())
    taken_at: Mapped[datetime | None]
    answered_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_plan_requests_open", "asked_at", postgresql_where=text("answered_at IS NULL")),
        Index("ix_plan_requests_answered", "answered_at"),
    )
