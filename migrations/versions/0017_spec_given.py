"""What was written of a spec

Beside the spec with every default, a job keeps what its user wrote of it. Of jobs from before
nobody knows.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("spec_given", JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "spec_given")
