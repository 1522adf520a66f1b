"""Owners' recipes in the database; a version, once stored, never changes."""

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import lock_name
from octrain_api.models import RecipeVersion


class RecipeRepository:
    """Appends versions and reads them."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(self, recipe: RecipeVersion) -> RecipeVersion:
        """Store the next version of a recipe; its number is given here."""
        await lock_name(self._session, f"recipe {recipe.owner} {recipe.name}")
        newest = select(func.max(RecipeVersion.version)).where(
            RecipeVersion.owner == recipe.owner, RecipeVersion.name == recipe.name
        )
        recipe.version = (await self._session.scalar(newest) or 0) + 1
        self._session.add(recipe)
        await self._session.flush()
        return recipe

    async def get(self, owner: str, name: str, version: int | None) -> RecipeVersion | None:
        """This version, or the newest that is not withdrawn for None."""
        statement = select(RecipeVersion).where(
            RecipeVersion.owner == owner, RecipeVersion.name == name
        )
        if version is not None:
            statement = statement.where(RecipeVersion.version == version)
        else:
            statement = statement.where(RecipeVersion.withdrawn_at.is_(None))
        statement = statement.order_by(RecipeVersion.version.desc()).limit(1)
        return (await self._session.scalars(statement)).one_or_none()

    async def versions(self, owner: str, name: str) -> Sequence[RecipeVersion]:
        """Every version, newest first, withdrawn ones too."""
        statement = (
            select(RecipeVersion)
            .where(RecipeVersion.owner == owner, RecipeVersion.name == name)
            .order_by(RecipeVersion.version.desc())
        )
        return (await self._session.scalars(statement)).all()

    async def newest(self, owner: str, limit: int, after: str) -> Sequence[RecipeVersion]:
        """The newest version of each recipe that is not withdrawn, by name, after this one."""
        statement = (
            select(RecipeVersion)
            .ext(distinct_on(RecipeVersion.name))
            .where(
                RecipeVersion.owner == owner,
                RecipeVersion.name > after,
                RecipeVersion.withdrawn_at.is_(None),
            )
            .order_by(RecipeVersion.name, RecipeVersion.version.desc())
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def withdraw(self, owner: str, name: str) -> int:
        """Take a recipe out of the list; its versions can still be named. How many there were."""
        result = await self._session.execute(
            update(RecipeVersion)
            .where(
                RecipeVersion.owner == owner,
                RecipeVersion.name == name,
                RecipeVersion.withdrawn_at.is_(None),
            )
            .values(withdrawn_at=func.now())
            .returning(RecipeVersion.version)
        )
        return len(result.all())
