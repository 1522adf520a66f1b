"""The table of requests that were sent with an Idempotency-Key."""

from datetime import datetime

from sqlalchemy import Index, func
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base


class IdempotencyKey(Base):
    """A request that made something: what it asked for, as a hash, and what it made."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    # The identifier of what was made. What the answer showed is not kept: it may hold a secret.
    target: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (Index("ix_idempotency_keys_created", "created_at"),)
