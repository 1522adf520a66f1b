"""Room for newest values

Each merge of batches updates the row of every series of its job: four thousand of them in a large
one. Half of each page is left free, so that the new row lies beside the old one, whose room is
taken again without a vacuum and without a look at the indexes.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE metric_series SET (fillfactor = 50)")


def downgrade() -> None:
    op.execute("ALTER TABLE metric_series RESET (fillfactor)")
