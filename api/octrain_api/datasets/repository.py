"""Data sets and the parts of their uploads in the database."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, exists, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import seconds
from octrain_api.jobs.transitions import FINAL
from octrain_api.models import Dataset, DatasetPart, Job

_COUNTED = ("uploading", "checking", "ready")


class DatasetRepository:
    """Reads, writes and locks data sets. What is deleted is not there, though its files may be."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, dataset: Dataset) -> None:
        """Store a new data set."""
        self._session.add(dataset)
        await self._session.flush()

    async def get(self, dataset_id: str, owner: str | None) -> Dataset | None:
        """A data set, if this owner may see it; None means every owner."""
        statement = select(Dataset).where(Dataset.id == dataset_id, Dataset.deleted_at.is_(None))
        if owner is not None:
            statement = statement.where(Dataset.owner == owner)
        return (await self._session.scalars(statement)).one_or_none()

    async def lock(
        self, dataset_id: str, owner: str | None, *, shared: bool = False
    ) -> Dataset | None:
        """The same with its row locked; `shared` keeps it from change, but not others from it."""
        statement = select(Dataset).where(Dataset.id == dataset_id, Dataset.deleted_at.is_(None))
        if owner is not None:
            statement = statement.where(Dataset.owner == owner)
        statement = statement.with_for_update(read=shared)
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def find_same(self, dataset: Dataset) -> Dataset | None:
        """The owner's data set of the same name, content and meaning, unless it is invalid."""
        statement = select(Dataset).where(
            Dataset.status.in_(_COUNTED),
            Dataset.owner == dataset.owner,
            Dataset.deleted_at.is_(None),
            Dataset.name == dataset.name,
            Dataset.sha256 == dataset.sha256,
            Dataset.size == dataset.size,
            Dataset.media == dataset.media,
            Dataset.format == dataset.format,
            Dataset.columns == dataset.columns,
        )
        statement = statement.order_by(Dataset.created_at.desc()).limit(1)
        return (await self._session.scalars(statement)).one_or_none()

    async def used(self, owner: str) -> tuple[int, int]:
        """How many data sets an owner has, and the bytes they take, or will when uploaded."""
        counted = func.sum(Dataset.size).filter(Dataset.status.in_(_COUNTED))
        statement = select(func.count(), func.coalesce(counted, 0)).where(
            Dataset.owner == owner, Dataset.deleted_at.is_(None)
        )
        count, size = (await self._session.execute(statement)).one()
        return int(count), int(size)

    async def page(
        self,
        owner: str | None,
        status: str | None,
        name: str | None,
        limit: int,
        after: tuple[datetime, str] | None,
    ) -> Sequence[Dataset]:
        """Up to `limit` data sets, newest first, older than the row `after`."""
        statement = (
            select(Dataset)
            .where(Dataset.deleted_at.is_(None))
            .order_by(Dataset.created_at.desc(), Dataset.id.desc())
            .limit(limit)
        )
        if owner is not None:
            statement = statement.where(Dataset.owner == owner)
        if status is not None:
            statement = statement.where(Dataset.status == status)
        if name is not None:
            statement = statement.where(Dataset.name == name)
        if after is not None:
            statement = statement.where(tuple_(Dataset.created_at, Dataset.id) < after)
        return (await self._session.scalars(statement)).all()

    async def jobs_using(self, dataset: Dataset, limit: int) -> Sequence[str]:
        """Jobs of the owner that are not final and read this data set."""
        statement = (
            select(Job.id)
            .where(Job.owner == dataset.owner)
            .where(Job.status.not_in([status.value for status in FINAL]))
            .where(Job.spec["data"]["dataset"].astext == dataset.id)
            .order_by(Job.id)
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def count_parts(self, dataset_id: str) -> int:
        """How many parts have been stored."""
        statement = select(func.count()).where(DatasetPart.dataset_id == dataset_id)
        return await self._session.scalar(statement) or 0

    async def parts(self, dataset_id: str) -> Sequence[DatasetPart]:
        """The parts in the order of the file."""
        statement = (
            select(DatasetPart)
            .where(DatasetPart.dataset_id == dataset_id)
            .order_by(DatasetPart.first_byte)
        )
        return (await self._session.scalars(statement)).all()

    async def add_part(self, dataset: Dataset, name: str, size: int) -> None:
        """Append a stored part to a locked data set."""
        self._session.add(
            DatasetPart(dataset_id=dataset.id, first_byte=dataset.received, size=size, name=name)
        )
        dataset.received += size
        dataset.updated_at = func.now()
        await self._session.flush()

    async def forget_parts(self, dataset_id: str) -> None:
        """The parts are not needed any more."""
        await self._session.execute(delete(DatasetPart).where(DatasetPart.dataset_id == dataset_id))

    async def claim_check(self, claim_seconds: float) -> Dataset | None:
        """The oldest complete upload that nobody checks, claimed for so long."""
        rows = (
            select(Dataset.id)
            .where(Dataset.status == "checking", Dataset.deleted_at.is_(None))
            .where(or_(Dataset.claimed_until.is_(None), Dataset.claimed_until <= func.now()))
            .order_by(Dataset.updated_at, Dataset.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        statement = (
            update(Dataset)
            .where(Dataset.id.in_(rows))
            .values(claimed_until=func.now() + seconds(claim_seconds))
            .returning(Dataset)
            .execution_options(synchronize_session=False)
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def renew_check(self, dataset_id: str, claim_seconds: float) -> None:
        """The check goes on."""
        await self._session.execute(
            update(Dataset)
            .where(Dataset.id == dataset_id)
            .values(claimed_until=func.now() + seconds(claim_seconds))
            .execution_options(synchronize_session=False)
        )

    async def release_check(self, dataset_id: str) -> None:
        """The check was not made to its end; anybody may begin it anew."""
        await self._session.execute(
            update(Dataset)
            .where(Dataset.id == dataset_id, Dataset.status == "checking")
            .values(claimed_until=None)
            .execution_options(synchronize_session=False)
        )

    async def expire(self, status: str, after_seconds: float) -> int:
        """Delete those of a status that nothing has happened to for so long; how many."""
        statement = (
            update(Dataset)
            .where(Dataset.status == status, Dataset.deleted_at.is_(None))
            .where(Dataset.updated_at < func.now() - seconds(after_seconds))
            .values(deleted_at=func.now())
            .returning(Dataset.id)
            .execution_options(synchronize_session=False)
        )
        return len((await self._session.execute(statement)).all())

    async def deleted(self, limit: int) -> Sequence[Dataset]:
        """Data sets whose files are to be removed; not those that are being checked still."""
        statement = (
            select(Dataset)
            .where(Dataset.deleted_at.is_not(None))
            .where(or_(Dataset.claimed_until.is_(None), Dataset.claimed_until <= func.now()))
            .order_by(Dataset.deleted_at)
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def with_needless_parts(self, limit: int) -> Sequence[Dataset]:
        """Data sets whose check is done while their parts still take room."""
        has_parts = exists().where(DatasetPart.dataset_id == Dataset.id)
        statement = (
            select(Dataset)
            .where(Dataset.status.in_(("ready", "invalid")), Dataset.deleted_at.is_(None))
            .where(has_parts)
            .limit(limit)
        )
        return (await self._session.scalars(statement)).all()

    async def remove_row(self, dataset_id: str) -> None:
        """Forget a deleted data set whose files are gone."""
        await self._session.execute(delete(Dataset).where(Dataset.id == dataset_id))
