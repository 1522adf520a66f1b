"""Cheaper new jobs

A spec is read as the text that it was written as, far more often than a member of it is looked up:
as `json` it is neither taken apart nor put together again, by each job that comes and each that is
listed. Most of it is out of the row either way; compressing it first saves a quarter of its bytes
and costs more than writing them. Where there are no webhooks an event costs one look at them.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSON, JSONB

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NOTE_EVENTS = """
CREATE OR REPLACE FUNCTION note_events_for_webhooks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {first}
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
_NONE = "IF NOT EXISTS (SELECT FROM webhooks) THEN RETURN NULL; END IF;"


def upgrade() -> None:
    op.alter_column(
        "jobs", "spec", type_=JSON(astext_type=sa.Text()), postgresql_using="spec::json"
    )
    op.execute("ALTER TABLE jobs ALTER COLUMN spec SET STORAGE EXTERNAL")
    op.execute(_NOTE_EVENTS.format(first=_NONE))


def downgrade() -> None:
    op.execute(_NOTE_EVENTS.format(first=""))
    op.execute("ALTER TABLE jobs ALTER COLUMN spec SET STORAGE EXTENDED")
    op.alter_column(
        "jobs", "spec", type_=JSONB(astext_type=sa.Text()), postgresql_using="spec::jsonb"
    )
