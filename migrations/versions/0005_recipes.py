"""Named recipes

Owners keep parts of specs under names, in versions; a job says which one it was made with.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recipe_versions",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("fragment", JSONB(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("owner", "name", "version", name="pk_recipe_versions"),
    )
    op.add_column("jobs", sa.Column("recipe_from", JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "recipe_from")
    op.drop_table("recipe_versions")
