"""Artifacts for readers: the list, the files, conversion report and precision table."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.artifacts import store
from octrain_api.artifacts.archive import StoredFile, TarArchive, TextFile
from octrain_api.artifacts.model_card import model_card
from octrain_api.artifacts.repository import ArtifactRepository
from octrain_api.artifacts.schemas import (
    ArtifactObject,
    ConversionReport,
    FileObject,
    PrecisionTable,
)
from octrain_api.models import Artifact, Job
from octrain_api.problems import Problem, not_found
from octrain_api.settings import Settings

log = logging.getLogger("octrain_api.artifacts")

_CARD = "README.md"
_LOADS_WITH = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
_REPORT_LIMIT = 64 * 2**20


class ArtifactService:
    """Reads what the repository knows and the store holds. The caller has checked the owner."""

    def __init__(self, session: AsyncSession, settings: Settings) -> None:
        self._artifacts = ArtifactRepository(session)
        self._root = settings.storage.artifact_url

    async def list_of(self, job_id: str, kind: str | None) -> list[ArtifactObject]:
        """The artifacts of a job, oldest first."""
        return [_artifact_object(a) for a in await self._artifacts.list_of(job_id, kind)]

    async def file(self, job_id: str, artifact_id: str, path: str) -> StoredFile:
        """A registered file that the store holds."""
        artifact = await self._artifacts.get(job_id, artifact_id)
        if artifact is None:
            raise not_found("artifact", artifact_id)
        return await self._stored(artifact, path)

    async def model_archive(self, job: Job) -> TarArchive:
        """The job's exported model, with a model card, as an archive that is not made yet."""
        artifact = await self._artifacts.newest(job.id, "model")
        if artifact is None:
            raise Problem(
                404,
                "not-found",
                "Not found",
                f"This job has no exported model: it is {job.status}.",
            )
        files: list[StoredFile | TextFile] = []
        for file in sorted(artifact.files, key=lambda row: str(row["path"])):
            if file["path"] == _CARD:
                continue
            files.append(await self._stored(artifact, file["path"]))
        card = model_card(
            job,
            loads_with=_LOADS_WITH[job.spec["task"]],
            conversion=await self._conversion_counts(job.id),
        )
        files.insert(0, TextFile(_CARD, card.encode()))
        modified = int(artifact.created_at.timestamp())
        return TarArchive(job.id, files, modified=modified)

    async def _conversion_counts(self, job_id: str) -> dict[str, Any] | None:
        try:
            rows = (await self.conversion(job_id)).rows
        except Problem:
            return None
        converted = sum(1 for row in rows if row["to"] is not None)
        return {"layers": len(rows), "converted": converted}

    async def conversion(self, job_id: str) -> ConversionReport:
        """The newest conversion report of a job."""
        artifact = await self._artifacts.newest(job_id, "conversion")
        if artifact is None:
            raise Problem(404, "not-found", "Not found", "This job has no conversion report (yet).")
        parsed = await self._parsed(artifact)
        try:
            rows = parsed["rows"] if isinstance(parsed, dict) else parsed
            return ConversionReport(attempt=artifact.attempt, rows=rows)
        except (KeyError, ValueError) as error:
            raise _damaged(artifact) from error

    async def precision(self, job_id: str) -> PrecisionTable:
        """The newest precision table of a job."""
        artifact = await self._artifacts.newest(job_id, "report", "precision.json")
        if artifact is None:
            raise Problem(
                404,
                "not-found",
                "Not found",
                "This job has no precision table (yet): it is measured on the first step.",
            )
        parsed = await self._parsed(artifact)
        try:
            return PrecisionTable(
                attempt=artifact.attempt,
                step=parsed["step"],
                engine=parsed["engine"],
                rows=parsed["rows"],
                engine_state=parsed["engine_state"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(artifact) from error

    async def _parsed(self, artifact: Artifact) -> Any:
        """The JSON value in the first file of a report."""
        row, content = await self._open(artifact, artifact.files[0]["path"])
        if row["size"] > _REPORT_LIMIT:
            raise Problem(
                404,
                "report-too-large",
                "Not found",
                f"The report has {row['size']} bytes; download it as artifact {artifact.id}.",
            )
        if isinstance(content, Path):
            data = await asyncio.to_thread(content.read_bytes)
        else:
            data = await asyncio.to_thread(b"".join, content)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _damaged(artifact) from error

    async def _stored(self, artifact: Artifact, path: str) -> StoredFile:
        row, content = await self._open(artifact, path)
        local = content if isinstance(content, Path) else None
        return StoredFile(path, row["size"], row["sha256"], artifact.url, path, local)

    async def _open(
        self, artifact: Artifact, path: str
    ) -> tuple[dict[str, Any], Path | Iterator[bytes]]:
        # Only what was registered is served: a path is looked up, never built.
        row = next((file for file in artifact.files if file["path"] == path), None)
        if row is None:
            raise not_found("file", path)
        try:
            if artifact.url.startswith("file:"):
                local = await asyncio.to_thread(store.local_file, artifact.url, path, self._root)
                if local is not None:
                    return row, local
            elif await asyncio.to_thread(store.exists, artifact.url, path):
                return row, store.read(artifact.url, path)
        except Exception as error:  # every store raises its own, and a node names any URL
            log.warning("artifact %s cannot be read: %r", artifact.id, error)
            raise Problem(
                404,
                "file-not-in-store",
                "Not found",
                f"The file {path!r} is registered, but this server cannot read the store that it "
                f"lies in ({type(error).__name__}); its log says more.",
            ) from error
        raise Problem(
            404,
            "file-not-in-store",
            "Not found",
            f"The file {path!r} is registered, but this server's artifact store does not hold it: "
            "it was removed, or lies in a store that only its node reaches.",
        )


def _damaged(artifact: Artifact) -> Problem:
    return Problem(
        404,
        "file-not-in-store",
        "Not found",
        f"The report {artifact.name!r} is damaged in the store: it is not what a trainer writes. "
        f"What there is of it can be downloaded as artifact {artifact.id}.",
    )


def _artifact_object(artifact: Artifact) -> ArtifactObject:
    files = [FileObject(**file) for file in artifact.files]
    return ArtifactObject(
        id=artifact.id,
        job_id=artifact.job_id,
        attempt=artifact.attempt,
        kind=artifact.kind,
        name=artifact.name,
        step=artifact.step,
        best=artifact.best,
        size=artifact.size,
        sha256=files[0].sha256 if len(files) == 1 else None,
        files=files,
        url=artifact.url,
        created_at=artifact.created_at,
    )
