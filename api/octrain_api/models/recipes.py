"""The table of owners' recipes."""

from datetime import datetime

from sqlalchemy import func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from octrain_api.models.base import Base, Json


class RecipeVersion(Base):
    """One version of an owner's recipe. Only `withdrawn_at` ever changes."""

    __tablename__ = "recipe_versions"

    owner: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    description: Mapped[str]
    # Parts of a spec, in canonical spelling and with every default.
    fragment: Mapped[Json] = mapped_column(JSONB)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    withdrawn_at: Mapped[datetime | None]
