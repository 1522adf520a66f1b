"""The tables. Alembic's migrations make them; `alembic check` holds the two together."""

from datetime import date, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    Sequence,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Names every constraint by rule, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    # Values that the database made (its clock's, above all) are read back with the statement.
    __mapper_args__ = {"eager_defaults": True}  # noqa: RUF012
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy
        str: Text,
        datetime: DateTime(timezone=True),
        float: Double,
        Json: JSONB,
        list[str]: ARRAY(Text),
        list[int]: ARRAY(Integer),
    }


fencing_tokens = Sequence("fencing_tokens", data_type=BigInteger, metadata=Base.metadata)


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


class ServiceCounter(Base):
    """Counters of the controller, which serves no HTTP: the API shows them to Prometheus."""

    __tablename__ = "service_counters"

    name: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class Node(Base):
    """A machine that runs attempts, as its worker last registered it."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str]
    boot_id: Mapped[str]
    hostname: Mapped[str]
    version: Mapped[str]
    device_kinds: Mapped[list[str]]
    cpu_slots: Mapped[int]
    gpus: Mapped[list[Json]] = mapped_column(JSONB)
    engines: Mapped[Json]
    roots: Mapped[list[str]]
    private_roots: Mapped[bool]
    artifact_url: Mapped[str | None]
    wanted: Mapped[str] = mapped_column(server_default="run")
    registered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())
    unreachable_since: Mapped[datetime | None]
    # When the columns above were last written: whoever keeps them in memory compares this.
    described_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Set aside for repeated faults, until an administrator releases it.
    quarantined_since: Mapped[datetime | None]
    quarantine_detail: Mapped[str | None]
    faults_from: Mapped[datetime | None]


class Job(Base):
    """One submitted job. `version` rises with every change that a reader can see."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str | None]
    labels: Mapped[Json]
    notes: Mapped[str]
    priority: Mapped[int]
    spec: Mapped[Json]
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
    idempotency_key: Mapped[str | None]
    idempotency_hash: Mapped[str | None]
    # The W3C trace context of the request that made it, where tracing is on.
    traceparent: Mapped[str | None]

    __table_args__ = (
        Index(
            "ix_jobs_owner_live",
            "owner",
            "status",
            postgresql_where=text("status NOT IN ('succeeded', 'failed', 'cancelled')"),
        ),
        UniqueConstraint("owner", "idempotency_key"),
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
    lease_seconds: Mapped[int]
    lease_expires_at: Mapped[datetime | None]
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


class MetricLayout(Base):
    """The names of the columns of metric blocks, in their order."""

    __tablename__ = "metric_layouts"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    digest: Mapped[bytes]
    names: Mapped[list[str]]

    __table_args__ = (UniqueConstraint("job_id", "digest"),)


class MetricSeries(Base):
    """One metric of one attempt, as far as its blocks have been compacted: tier 1 and above.

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


class MetricBlock(Base):
    """A matrix of points: appended as one batch brought it (tier 0), then joined with others into
    larger ones. What the bytes are is octrain_api.metrics.codec's.
    """

    __tablename__ = "metric_blocks"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[str]
    attempt: Mapped[int]
    layout_id: Mapped[int] = mapped_column(ForeignKey("metric_layouts.id", ondelete="CASCADE"))
    tier: Mapped[int]
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
    # None once the raw points are gone and only the rollups are kept.
    data: Mapped[bytes | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        Index("ix_metric_blocks_job", "job_id", "last_seq"),
        Index("ix_metric_blocks_layout", "layout_id"),
        Index(
            "ix_metric_blocks_open",
            "job_id",
            "attempt",
            "last_seq",
            postgresql_where=text("tier < 100"),
        ),
        Index(
            "ix_metric_blocks_raw",
            "created_at",
            postgresql_where=text("tier = 100 AND data IS NOT NULL"),
        ),
        Index("ix_metric_blocks_age", "created_at", postgresql_where=text("tier = 100")),
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
    """The log lines of one telemetry batch, numbered `first_line`... per job."""

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

    __table_args__ = (
        Index("ix_log_chunks_seq", "job_id", "seq"),
        Index("ix_log_chunks_last_line", "job_id", "last_line"),
    )


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


class NodeSample(Base):
    """What a node's GPUs and its host did at a time. Old ones go as new ones come."""

    __tablename__ = "node_samples"

    node_id: Mapped[str] = mapped_column(
        ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    host: Mapped[Json]
    gpus: Mapped[list[Json]] = mapped_column(JSONB)

    __table_args__ = (Index("ix_node_samples_time", "node_id", "time"),)


class GpuActivity(Base):
    """Until when the GPUs of an attempt were seen, and when one was last seen at work."""

    __tablename__ = "gpu_activity"

    attempt_id: Mapped[str] = mapped_column(
        ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True
    )
    seen_at: Mapped[datetime]
    busy_at: Mapped[datetime]


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


class QueueGroup(Base):
    """What the queued jobs of one need wait for, as of the scheduler's last tick."""

    __tablename__ = "queue_groups"

    need: Mapped[str] = mapped_column(primary_key=True)
    waiting_for: Mapped[str]
    as_of: Mapped[datetime]


class ServiceClock(Base):
    """When each part of the service was last known to live; the source of downtime."""

    __tablename__ = "service_clocks"

    name: Mapped[str] = mapped_column(primary_key=True)
    alive_at: Mapped[datetime]
    up_since: Mapped[datetime]
    counted_until: Mapped[datetime]
