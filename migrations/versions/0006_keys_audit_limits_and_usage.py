"""Keys, audit, limits and usage

Keys expire, rotate, are bound to nodes and enrolled by tokens; changes are recorded; requests are
limited and use is counted per owner; jobs carry a trace context.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_LIVE = sa.text("status NOT IN ('succeeded', 'failed', 'cancelled')")
_KEY_COLUMNS = {
    "expires_at": _TIME,
    "last_used_at": _TIME,
    "previous_hash": sa.Text(),
    "previous_until": _TIME,
    "node_name": sa.Text(),
}


def upgrade() -> None:
    for name, kind in _KEY_COLUMNS.items():
        op.add_column("api_keys", sa.Column(name, kind, nullable=True))
    op.create_unique_constraint("uq_api_keys_previous_hash", "api_keys", ["previous_hash"])
    # A node key of an owner with a single node and a single such key is that node's; others are
    # bound when their worker registers again.
    op.execute(
        """
        WITH alone AS (
            SELECT owner, min(name) AS name FROM nodes GROUP BY owner HAVING count(*) = 1
        ), single AS (
            SELECT owner, min(id) AS id FROM api_keys
            WHERE 'node' = ANY(scopes) AND revoked_at IS NULL GROUP BY owner HAVING count(*) = 1
        )
        UPDATE api_keys k SET node_name = alone.name
        FROM alone JOIN single USING (owner) WHERE k.id = single.id
        """
    )
    op.create_index("ix_api_keys_created", "api_keys", ["created_at", "id"])
    op.create_index(
        "uq_api_keys_node",
        "api_keys",
        ["node_name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "enrolment_tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("node_name", sa.Text(), nullable=True),
        sa.Column("created_at", _TIME, server_default=sa.func.now(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("used_at", _TIME, nullable=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_enrolment_tokens")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_enrolment_tokens_token_hash")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("time", _TIME, server_default=sa.func.now(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_time", "audit_log", ["time", "id"])
    op.create_index("ix_audit_log_target", "audit_log", ["target", "time", "id"])
    op.create_index("ix_audit_log_owner", "audit_log", ["owner", "time", "id"])
    op.execute(
        """
        CREATE FUNCTION audit_log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'the audit log is append-only';
        END $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
        FOR EACH STATEMENT EXECUTE FUNCTION audit_log_is_append_only()
        """
    )
    op.create_table(
        "rate_buckets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("granted", sa.Integer(), nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_rate_buckets")),
    )
    op.create_table(
        "owner_quotas",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("queued", sa.Integer(), nullable=True),
        sa.Column("running", sa.Integer(), nullable=True),
        sa.Column("gpu_hours", sa.Double(), nullable=True),
        sa.Column("updated_at", _TIME, server_default=sa.func.now(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_owner_quotas")),
    )
    op.create_table(
        "usage_days",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("cpu_seconds", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "day", name=op.f("pk_usage_days")),
    )
    op.execute(
        """
        INSERT INTO usage_days (owner, day, gpu_seconds, cpu_seconds, attempts)
        SELECT j.owner, CAST(a.ended_at AT TIME ZONE 'UTC' AS date),
               sum(extract(epoch FROM a.ended_at - a.claimed_at) * cardinality(a.gpu_indices)),
               coalesce(sum(extract(epoch FROM a.ended_at - a.claimed_at))
                   FILTER (WHERE a.device = 'cpu'), 0),
               count(*)
        FROM attempts a JOIN jobs j ON j.id = a.job_id
        WHERE a.claimed_at IS NOT NULL AND a.ended_at IS NOT NULL GROUP BY 1, 2
        """
    )
    op.create_table(
        "service_counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name=op.f("pk_service_counters")),
    )
    op.add_column("jobs", sa.Column("traceparent", sa.Text(), nullable=True))
    op.create_index("ix_jobs_owner_live", "jobs", ["owner", "status"], postgresql_where=_LIVE)


def downgrade() -> None:
    op.drop_index("ix_jobs_owner_live", table_name="jobs", postgresql_where=_LIVE)
    op.drop_column("jobs", "traceparent")
    for table in ("service_counters", "usage_days", "owner_quotas", "rate_buckets", "audit_log"):
        op.drop_table(table)
    op.execute("DROP FUNCTION audit_log_is_append_only()")
    op.drop_table("enrolment_tokens")
    op.drop_index("uq_api_keys_node", table_name="api_keys")
    op.drop_index("ix_api_keys_created", table_name="api_keys")
    op.drop_constraint("uq_api_keys_previous_hash", "api_keys")
    for name in _KEY_COLUMNS:
        op.drop_column("api_keys", name)
