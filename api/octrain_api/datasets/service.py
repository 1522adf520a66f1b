"""What users do with data sets: announce, look at, delete; and what a spec may use."""

from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.auth import Principal
from octrain_api.database import database_now, lock_name
from octrain_api.datasets.repository import DatasetRepository
from octrain_api.datasets.schemas import (
    ROLES,
    DataProblem,
    DatasetList,
    DatasetObject,
    DatasetRequest,
)
from octrain_api.ids import new_id
from octrain_api.models import Dataset
from octrain_api.pagination import cut, decode_cursor, encode_cursor
from octrain_api.problems import Problem, ProblemError, conflict, not_found
from octrain_api.settings import DatasetSettings

_NAMED_JOBS = 5


class DatasetService:
    """One owner's data sets, or every owner's for an administrator."""

    def __init__(
        self, session: AsyncSession, settings: DatasetSettings, principal: Principal
    ) -> None:
        self._session = session
        self._settings = settings
        self._principal = principal
        self._datasets = DatasetRepository(session)

    async def announce(self, request: DatasetRequest) -> tuple[DatasetObject, bool]:
        """Begin an upload, or find the same one again; whether it is new."""
        owner = self._principal.owner
        dataset = Dataset(
            id=new_id("ds"), owner=owner, status="uploading", **request.model_dump(mode="json")
        )
        # Announcements of one owner come one after the other: the quota is counted below.
        await lock_name(self._session, f"datasets {owner}")
        same = await self._datasets.find_same(dataset)
        if same is not None:
            return self._object(same), False
        if request.size > self._settings.max_bytes:
            raise Problem(
                413,
                "dataset-too-large",
                "Data set too large",
                f"A data set has {self._settings.max_bytes} bytes at most.",
            )
        count, used = await self._datasets.used(owner)
        if count >= self._settings.most_per_owner:
            most = self._settings.most_per_owner
            raise conflict("dataset-quota-exceeded", f"An owner has {most} data sets at most.")
        if used + request.size > self._settings.quota_bytes:
            raise conflict(
                "dataset-quota-exceeded",
                f"{used} of {self._settings.quota_bytes} bytes are used; {request.size} more do "
                "not fit. Delete a data set that is no longer needed.",
                bytes_used=used,
                bytes_allowed=self._settings.quota_bytes,
            )
        await self._datasets.add(dataset)
        return self._object(dataset), True

    async def list_page(
        self, status: str | None, name: str | None, limit: int, cursor: str | None
    ) -> DatasetList:
        """One page, newest first."""
        after = decode_cursor(cursor) if cursor is not None else None
        owner = self._principal.visible_owner
        rows = await self._datasets.page(owner, status, name, limit + 1, after)
        page = rows[:limit]
        last = encode_cursor(page[-1].created_at, page[-1].id) if cut(rows, limit) else None
        _, used = await self._datasets.used(self._principal.owner)
        return DatasetList(
            items=[self._object(row) for row in page],
            next_cursor=last,
            bytes_used=used,
            bytes_allowed=self._settings.quota_bytes,
        )

    async def get(self, dataset_id: str) -> DatasetObject:
        """One data set."""
        dataset = await self._datasets.get(dataset_id, self._principal.visible_owner)
        if dataset is None:
            raise not_found("data set", dataset_id)
        return self._object(dataset)

    async def remove(self, dataset_id: str) -> None:
        """Delete a data set, unless a job that has not ended reads it."""
        dataset = await self._datasets.lock(dataset_id, self._principal.visible_owner)
        if dataset is None:
            raise not_found("data set", dataset_id)
        jobs = list(await self._datasets.jobs_using(dataset, _NAMED_JOBS))
        if jobs:
            raise conflict(
                "dataset-in-use",
                f"Jobs that have not ended read this data set: {', '.join(jobs)}. Cancel them, or "
                "wait for their end.",
                jobs=jobs,
            )
        dataset.deleted_at = await database_now(self._session)
        await self._session.flush()

    async def pin(self, data: dict[str, Any]) -> list[ProblemError]:
        """Why a spec's `data` cannot use the upload it names; else its sha256 is filled in.

        The row stays locked against deletion until the job is stored.
        """
        # An administrator too uses only data of their own: a job's owner must own what it reads.
        owner = self._principal.owner
        dataset = await self._datasets.lock(data["dataset"], owner, shared=True)
        if dataset is None:
            message = f"there is no data set {data['dataset']!r}"
            return [_error("/data/dataset", message, "not_found")]
        if dataset.status != "ready":
            message = f"the data set is {dataset.status}, not ready"
            if dataset.problems:
                message += f"; its first problem: {dataset.problems[0]['message']}"
            return [_error("/data/dataset", message, "not_ready")]
        if data.get("sha256") not in (None, dataset.sha256):
            message = f"the data set's sha256 is {dataset.sha256}"
            return [_error("/data/sha256", message, "sha256")]
        if data["format"] != dataset.format:
            message = f"the data set was checked as {dataset.format!r}, not {data['format']!r}"
            return [_error("/data/format", message, "format", dataset.format)]
        errors = []
        for role in ROLES[dataset.format] if dataset.media != "text" else ():
            wanted, checked = data["columns"][role], dataset.columns[role]
            if wanted != checked:
                message = f"the data set was checked with the column {checked!r}, not {wanted!r}"
                errors.append(_error(f"/data/columns/{role}", message, "column", checked))
        data["sha256"] = dataset.sha256
        return errors

    def _object(self, row: Dataset) -> DatasetObject:
        expires = None
        if row.status == "uploading":
            expires = row.updated_at + timedelta(seconds=self._settings.expire_after)
        return DatasetObject(
            id=row.id,
            owner=row.owner,
            name=row.name,
            media=row.media,
            format=row.format,
            columns={role: row.columns[role] for role in ROLES[row.format]},
            size=row.size,
            sha256=row.sha256,
            status=row.status,
            received=row.received,
            rows=row.rows,
            problem_count=row.problem_count,
            problems=[DataProblem(**problem) for problem in row.problems],
            created_at=row.created_at,
            updated_at=row.updated_at,
            checked_at=row.checked_at,
            expires_at=expires,
        )


def _error(pointer: str, message: str, code: str, suggestion: str | None = None) -> ProblemError:
    return ProblemError(pointer=pointer, message=message, code=code, suggestion=suggestion)
