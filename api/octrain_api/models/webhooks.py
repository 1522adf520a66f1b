"""Webhooks and what was sent to them."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    ForeignKey,
    Identity,
    Index,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class Webhook(Base):
    """An endpoint of a user that events are sent to. Its secrets must be known here to sign."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    url: Mapped[str]
    description: Mapped[str]
    # Event types, and labels that the job must have: both filters must pass.
    events: Mapped[list[str]]
    labels: Mapped[Json]
    active: Mapped[bool] = mapped_column(Boolean, server_default="true")
    secret: Mapped[str]
    # Former secrets that still sign: [{"secret", "until"}], the newest first.
    old_secrets: Mapped[list[Json]] = mapped_column(JSONB, server_default=text("'[]'::jsonb"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_success_at: Mapped[datetime | None]
    # Since when, and in how many attempts, it has taken nothing.
    failing_since: Mapped[datetime | None]
    failures: Mapped[int] = mapped_column(server_default="0")
    # It asked for peace until then (Retry-After).
    not_before: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None]

    __table_args__ = (Index("ix_webhooks_owner", "owner", "created_at", "id"),)


class WebhookOutbox(Base):
    """An event that a webhook may want. A trigger on `events` writes it in the event's transaction.

    No foreign keys: rows are short-lived, and an event that is gone is passed over.
    """

    __tablename__ = "webhook_outbox"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str]
    seq: Mapped[int] = mapped_column(BigInteger)


class WebhookDelivery(Base):
    """One message for one endpoint: `pending` until `delivered` or `failed`."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    message_id: Mapped[str]
    type: Mapped[str]
    job_id: Mapped[str | None]
    event_seq: Mapped[int | None] = mapped_column(BigInteger)
    # The very text that is signed and sent.
    body: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="pending")
    detail: Mapped[str | None]
    # Attempts ever, and since it was last queued: the pauses grow with the second.
    attempts: Mapped[int] = mapped_column(server_default="0")
    tries: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    queued_at: Mapped[datetime] = mapped_column(server_default=func.now())
    next_attempt_at: Mapped[datetime | None] = mapped_column(server_default=func.now())
    # A controller is sending it; one that died leaves it due again at this time.
    claimed_until: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        UniqueConstraint("webhook_id", "message_id"),
        Index("ix_webhook_deliveries_created", "webhook_id", "created_at", "id"),
        Index("ix_webhook_deliveries_ended", "ended_at"),
        Index(
            "ix_webhook_deliveries_due",
            "webhook_id",
            "next_attempt_at",
            postgresql_where=text("status = 'pending'"),
        ),
        Index(
            "ix_webhook_deliveries_tests",
            "next_attempt_at",
            postgresql_where=text("status = 'pending' AND type = 'webhook.test'"),
        ),
        Index(
            "ix_webhook_deliveries_queued",
            "queued_at",
            postgresql_where=text("status = 'pending'"),
        ),
    )


class WebhookAttempt(Base):
    """One try to deliver, and what came back."""

    __tablename__ = "webhook_attempts"

    delivery_id: Mapped[str] = mapped_column(
        ForeignKey("webhook_deliveries.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime]
    status_code: Mapped[int | None]
    duration_ms: Mapped[int]
    error: Mapped[str | None]
    response_excerpt: Mapped[str]
