"""Keys, what was done with them, and what their owners may use."""

from datetime import date, datetime

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base


class ApiKey(Base):
    """A bearer key. Only its SHA-256 is stored: the key itself has 256 random bits."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    owner: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    # Written at most once a minute by each API process.
    last_used_at: Mapped[datetime | None]
    # The key before the last rotation, which serves until then.
    previous_hash: Mapped[str | None] = mapped_column(unique=True)
    previous_until: Mapped[datetime | None]
    # The one node that a key of the scope `node` speaks for.
    node_name: Mapped[str | None]

    __table_args__ = (
        Index("ix_api_keys_created", "created_at", "id"),
        # A node has one key at a time, whatever the code above does.
        Index(
            "uq_api_keys_node",
            "node_name",
            unique=True,
            postgresql_where=text("revoked_at IS NULL"),
        ),
    )


class KeySession(Base):
    """A browser that signed in with a key. Only the hash of its token is stored."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"))
    # The hash of the secret that it was opened with: of a rotated key only one may still serve.
    key_hash: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_sessions_key", "key_id", "created_at"),
        Index("ix_sessions_end", "expires_at"),
    )


class EnrolmentToken(Base):
    """A token with which one machine gets the key of its node, once. Only its hash is stored."""

    __tablename__ = "enrolment_tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    token_hash: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str]
    node_name: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    key_id: Mapped[str | None]


class AuditEntry(Base):
    """Who changed what, when, from where, with what outcome. A trigger refuses every rewrite."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    time: Mapped[datetime] = mapped_column(server_default=func.now())
    key_id: Mapped[str]
    owner: Mapped[str]
    address: Mapped[str | None]
    request_id: Mapped[str]
    method: Mapped[str]
    route: Mapped[str]
    target: Mapped[str | None]
    status: Mapped[int]
    outcome: Mapped[str]

    __table_args__ = (
        Index("ix_audit_log_time", "time", "id"),
        Index("ix_audit_log_target", "target", "time", "id"),
        Index("ix_audit_log_owner", "owner", "time", "id"),
    )


class RateBucket(Base):
    """What is left of a rate limit; API processes take from it in portions."""

    __tablename__ = "rate_buckets"

    name: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[float]
    granted: Mapped[int]
    updated_at: Mapped[datetime]


class OwnerQuota(Base):
    """What one owner may use, where it differs from the settings' default; null is no limit."""

    __tablename__ = "owner_quotas"

    owner: Mapped[str] = mapped_column(primary_key=True)
    queued: Mapped[int | None]
    running: Mapped[int | None]
    gpu_hours: Mapped[float | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class UsageDay(Base):
    """What an owner's attempts used, counted on the day of their end. Outlives the jobs."""

    __tablename__ = "usage_days"

    owner: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    gpu_seconds: Mapped[float]
    cpu_seconds: Mapped[float]
    attempts: Mapped[int]
