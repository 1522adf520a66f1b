"""Jobs, their attempts, and what happened to them."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSON, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class Job(Base):
    """One submitted job. `version` rises with every change that a reader can see."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str | None]
    labels: Mapped[Json]
    notes: Mapped[str]
    priority: Mapped[int]
    # Read as the text that it is far more often than looked into.
    spec: Mapped[Json] = mapped_column(JSON)
    # What was written of it; null in jobs from before this was kept. Read where it is asked for.
    spec_given: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    # The named recipe that the spec was made with: {"name", "version"}.
    recipe_from: Mapped[Json | None]
    status: Mapped[str]
    reason: Mapped[str | None]
    detail: Mapped[str | None]
    device: Mapped[str | None]
    # What the job needs of a node; queued jobs of one need are placed, or not, together.
    need: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger, server_default="1")
    # One number line per job for events, metric batches and log batches: its stream's ids.
    sequence: Mapped[int] = mapped_column(BigInteger, server_default="0")
    log_lines: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Up to this number metric or log batches may be gone: the stream is told in full after it.
    stream_floor: Mapped[int] = mapped_column(BigInteger, server_default="0")
    step: Mapped[int] = mapped_column(BigInteger, server_default="0")
    total_steps: Mapped[int | None] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    eta_seconds: Mapped[float | None]
    latest_metrics: Mapped[Json] = mapped_column(server_default=text("'{}'::jsonb"))
    attempt: Mapped[int] = mapped_column(server_default="0")
    restarts: Mapped[int] = mapped_column(server_default="0")
    avoid_nodes: Mapped[list[str]] = mapped_column(server_default=text("'{}'::text[]"))
    next_attempt_at: Mapped[datetime | None]
    queue_deadline_at: Mapped[datetime | None]
    stop_deadline_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    # What is left of a deleted job is its trail: nobody sees it as a job any more.
    deleted_at: Mapped[datetime | None]
    # The W3C trace context of the request that made it, where tracing is on.
    traceparent: Mapped[str | None]

    __table_args__ = (
        Index(
            "ix_jobs_owner_live",
            "owner",
            "status",
            postgresql_where=text("status NOT IN ('succeeded', 'failed', 'cancelled')"),
        ),
        Index("ix_jobs_created", "created_at", "id"),
        Index("ix_jobs_owner_created", "owner", "created_at", "id"),
        Index(
            "ix_jobs_queue",
            text("priority DESC"),
            "created_at",
            "id",
            postgresql_where=text("status = 'queued'"),
        ),
        Index(
            "ix_jobs_queue_need",
            "need",
            text("priority DESC"),
            "created_at",
            "id",
            postgresql_where=text("status = 'queued'"),
        ),
        Index(
            "ix_jobs_queue_deadline",
            "queue_deadline_at",
            postgresql_where=text("status = 'queued'"),
        ),
        Index(
            "ix_jobs_placed",
            "id",
            postgresql_where=text("status IN ('starting', 'running', 'pausing', 'cancelling')"),
        ),
        Index("ix_jobs_labels", "labels", postgresql_using="gin"),
    )


class Attempt(Base):
    """One run of a job on one node: `placed`, then `running` once claimed, then `ended`."""

    __tablename__ = "attempts"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    status: Mapped[str] = mapped_column(server_default="placed")
    fencing_token: Mapped[int] = mapped_column(BigInteger)
    device: Mapped[str]
    gpu_indices: Mapped[list[int]]
    cpu_slots: Mapped[int] = mapped_column(server_default="0")
    lease_seconds: Mapped[int]
    # Until when the supervisor may count on a lease, as far as it can be known here.
    lease_expires_at: Mapped[datetime | None]
    # The last one granted, which may end sooner; whether it is held, a heartbeat says.
    lease_number: Mapped[int] = mapped_column(server_default="0")
    lease_granted_until: Mapped[datetime | None]
    last_heartbeat_at: Mapped[datetime | None]
    unreachable_since: Mapped[datetime | None]
    supervisor: Mapped[str | None]
    phase: Mapped[str | None]
    step: Mapped[int | None] = mapped_column(BigInteger)
    # When the step or the phase last changed, and since when that is too long ago.
    progress_at: Mapped[datetime | None]
    stalled_since: Mapped[datetime | None]
    stall_seconds: Mapped[int | None]
    run_deadline_at: Mapped[datetime | None]
    # When it was first heard again after the API itself had been away.
    outage_at: Mapped[datetime | None]
    acknowledged_seq: Mapped[int] = mapped_column(BigInteger, server_default="0")
    outcome: Mapped[str | None]
    reason: Mapped[str | None]
    detail: Mapped[str | None]
    exit_code: Mapped[int | None]
    finish_report: Mapped[Json | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    claimed_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        UniqueConstraint("job_id", "number"),
        # A job has one live attempt at most, whatever the code above does.
        Index(
            "uq_attempts_live",
            "job_id",
            unique=True,
            postgresql_where=text("status <> 'ended'"),
        ),
        Index("ix_attempts_live_node", "node_id", postgresql_where=text("status <> 'ended'")),
        Index(
            "ix_attempts_ended_node",
            "node_id",
            "ended_at",
            postgresql_where=text("status = 'ended'"),
        ),
    )


class Outbox(Base):
    """A Celery message to be sent for an attempt; gone once the attempt is claimed or ends.

    No foreign key: the row is made with its attempt in one statement and deleted with its claim or
    end, and a check planned while the attempts are few would read them all once they are many.
    """

    __tablename__ = "outbox"

    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    queue: Mapped[str]
    task_id: Mapped[str]
    payload: Mapped[Json]
    sendings: Mapped[int] = mapped_column(server_default="0")
    sent_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Event(Base):
    """What happened to a job: append-only, numbered per job, also the audit trail."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    time: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    actor: Mapped[str]
    message: Mapped[str]
    attempt: Mapped[int | None]
    data: Mapped[Json]
    # The transaction that wrote it: orders the events of all jobs (events/order.py).
    transaction_id: Mapped[int] = mapped_column(
        BigInteger, server_default=text("pg_current_xact_id()::text::bigint")
    )

    __table_args__ = (Index("ix_events_order", "transaction_id", "job_id", "seq"),)


class QueueGroup(Base):
    """What the queued jobs of one need wait for, as of the scheduler's last tick."""

    __tablename__ = "queue_groups"

    need: Mapped[str] = mapped_column(primary_key=True)
    waiting_for: Mapped[str]
    as_of: Mapped[datetime]
