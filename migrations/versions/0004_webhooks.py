"""Webhooks

Endpoints, their messages and attempts. A trigger writes each event that a webhook may want into an
outbox, in the transaction of the event, whichever statement wrote it.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("events", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("labels", postgresql.JSONB(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False, server_default="true"),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column(
            "old_secrets", postgresql.JSONB(), nullable=False, server_default=sa.text("'[]'::jsonb")
        ),
        sa.Column("created_at", _TIME, nullable=False, server_default=sa.func.now()),
        sa.Column("last_success_at", _TIME, nullable=True),
        sa.Column("failing_since", _TIME, nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("not_before", _TIME, nullable=True),
        sa.Column("disabled_at", _TIME, nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner", "created_at", "id"])
    op.create_table(
        "webhook_outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_outbox")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("event_seq", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False, server_default="pending"),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("tries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", _TIME, nullable=False, server_default=sa.func.now()),
        sa.Column("queued_at", _TIME, nullable=False, server_default=sa.func.now()),
        sa.Column("next_attempt_at", _TIME, nullable=True, server_default=sa.func.now()),
        sa.Column("claimed_until", _TIME, nullable=True),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            ondelete="CASCADE",
            name=op.f("fk_webhook_deliveries_webhook_id_webhooks"),
        ),
        sa.UniqueConstraint(
            "webhook_id", "message_id", name=op.f("uq_webhook_deliveries_webhook_id_message_id")
        ),
    )
    op.create_index(
        "ix_webhook_deliveries_created", "webhook_deliveries", ["webhook_id", "created_at", "id"]
    )
    op.create_index("ix_webhook_deliveries_ended", "webhook_deliveries", ["ended_at"])
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["webhook_id", "next_attempt_at"],
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        "ix_webhook_deliveries_tests",
        "webhook_deliveries",
        ["next_attempt_at"],
        postgresql_where=sa.text("status = 'pending' AND type = 'webhook.test'"),
    )
    op.create_index(
        "ix_webhook_deliveries_queued",
        "webhook_deliveries",
        ["queued_at"],
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_table(
        "webhook_attempts",
        sa.Column("delivery_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("response_excerpt", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("delivery_id", "number", name=op.f("pk_webhook_attempts")),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["webhook_deliveries.id"],
            ondelete="CASCADE",
            name=op.f("fk_webhook_attempts_delivery_id_webhook_deliveries"),
        ),
    )
    # Filters are applied later, by who reads the outbox: here only owners without a webhook are
    # left out, so that those who have none pay for one look into a small table.
    op.execute(
        """
        CREATE FUNCTION note_events_for_webhooks() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO webhook_outbox (job_id, seq)
            SELECT fresh.job_id, fresh.seq
            FROM fresh JOIN jobs ON jobs.id = fresh.job_id
            WHERE EXISTS (
                SELECT FROM webhooks
                WHERE webhooks.owner = jobs.owner AND active AND disabled_at IS NULL
            )
            ORDER BY fresh.job_id, fresh.seq;
            IF FOUND THEN
                PERFORM pg_notify('octrain_webhook', '');
            END IF;
            RETURN NULL;
        END
        $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER events_for_webhooks AFTER INSERT ON events
        REFERENCING NEW TABLE AS fresh
        FOR EACH STATEMENT EXECUTE FUNCTION note_events_for_webhooks()
        """
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER events_for_webhooks ON events")
    op.execute("DROP FUNCTION note_events_for_webhooks()")
    for table in ("webhook_attempts", "webhook_deliveries", "webhook_outbox", "webhooks"):
        op.drop_table(table)
