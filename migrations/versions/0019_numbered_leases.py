"""Numbered leases

Each lease that is granted has a number, and a supervisor says with its heartbeat which it holds.
Where an answer is lost the service so knows that the one before is still held, and waits for it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "attempts", sa.Column("lease_number", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column(
        "attempts", sa.Column("lease_granted_until", sa.DateTime(timezone=True), nullable=True)
    )


def downgrade() -> None:
    op.drop_column("attempts", "lease_granted_until")
    op.drop_column("attempts", "lease_number")
