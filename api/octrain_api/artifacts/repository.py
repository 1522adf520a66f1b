"""Artifacts in the database."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.models import Artifact


class ArtifactRepository:
    """Reads artifacts."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def list_of(self, job_id: str, kind: str | None) -> Sequence[Artifact]:
        """The artifacts of a job, oldest first."""
        statement = select(Artifact).where(Artifact.job_id == job_id)
        if kind is not None:
            statement = statement.where(Artifact.kind == kind)
        statement = statement.order_by(Artifact.created_at, Artifact.id)
        return (await self._session.scalars(statement)).all()

    async def get(self, job_id: str, artifact_id: str) -> Artifact | None:
        """An artifact of this job."""
        statement = select(Artifact).where(Artifact.id == artifact_id, Artifact.job_id == job_id)
        return (await self._session.scalars(statement)).one_or_none()

    async def newest(self, job_id: str, kind: str, name: str | None = None) -> Artifact | None:
        """The newest artifact of a kind, and of a name where one is given."""
        statement = select(Artifact).where(Artifact.job_id == job_id, Artifact.kind == kind)
        if name is not None:
            statement = statement.where(Artifact.name == name)
        statement = statement.order_by(Artifact.attempt.desc(), Artifact.created_at.desc()).limit(1)
        return (await self._session.scalars(statement)).one_or_none()

    async def model_of(self, job_id: str, checkpoint: str | int) -> Artifact | None:
        """The artifact that another job can begin with.

        `checkpoint` is "model" for the exported model, "best", "last" or a step for a checkpoint.
        """
        statement = select(Artifact).where(Artifact.job_id == job_id)
        if checkpoint == "model":
            statement = statement.where(Artifact.kind == "model")
        else:
            statement = statement.where(Artifact.kind == "checkpoint")
        if checkpoint == "best":
            statement = statement.where(Artifact.best)
        elif isinstance(checkpoint, int):
            statement = statement.where(Artifact.step == checkpoint)
        statement = statement.order_by(
            Artifact.step.desc().nulls_last(), Artifact.attempt.desc(), Artifact.created_at.desc()
        ).limit(1)
        return (await self._session.scalars(statement)).one_or_none()
