"""Data sets: files that are uploaded once and named by jobs as ``data.source: upload``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from octrain.client.errors import OctrainError, ServerUnreachable
from octrain.client.models import Problem
from octrain.client.transport import Transport

# (bytes the server has, bytes of the file)
OnUpload = Callable[[int, int], None]

_MEDIA = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
}
_SMALLEST_PART = 8 * 2**20
_LARGEST_PART = 32 * 2**20  # what a server takes in one request
_MOST_PARTS = 9000  # a server takes 10,000; cuts make some more
_PAUSE = 0.25
_LONGEST_PAUSE = 5.0


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class DataProblem(_Answer):
    """Something wrong in an uploaded file: ``line`` from 1 (of Parquet the row), or None."""

    line: int | None = None
    message: str = ""

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class Dataset(_Answer):
    """A data set as the server last told it."""

    id: str
    owner: str | None = None
    name: str = ""
    media: str = ""
    format: str = ""
    columns: dict[str, str] = Field(default_factory=dict)
    size: int = 0
    sha256: str = ""
    status: str
    received: int = 0
    rows: int | None = None
    problem_count: int = 0
    problems: list[DataProblem] = Field(default_factory=list)
    created_at: datetime | None = None
    updated_at: datetime | None = None
    checked_at: datetime | None = None
    expires_at: datetime | None = None


class DatasetInvalid(OctrainError):
    """The server's check refused the file; ``dataset.problems`` says what and where."""

    def __init__(self, dataset: Dataset) -> None:
        problems = [Problem(message=str(p), line=p.line) for p in dataset.problems[:10]]
        detail = f"Data set {dataset.id} is invalid: {dataset.problem_count} problem(s)."
        super().__init__(detail, status=422, title="Data set not valid", problems=problems)
        self.dataset = dataset


class Datasets:
    """``client.datasets``"""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        media: str | None = None,
        format: str = "text",
        columns: Mapping[str, str] | None = None,
        progress: OnUpload | None = None,
        wait: bool = True,
        patience_seconds: float = 60.0,
    ) -> Dataset:
        """Upload a file and return it when the server has checked it (or, without ``wait``, when
        it has all bytes).

        A broken connection is taken up again until nothing has arrived for ``patience_seconds``.
        Called again with the same file and name, it goes on where it stood. ``media`` is told by
        the suffix: ``jsonl``, ``text`` or ``parquet``. Errors: DatasetInvalid, OctrainError,
        ServerUnreachable.
        """
        file = Path(path)
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            wanted = {
                "name": name or file.name,
                "size": content.tell(),
                "sha256": digest,
                "media": media or _media_of(file),
                "format": format,
                "columns": dict(columns or {}),
            }
            answer = self._transport.request("POST", "/datasets", json=wanted, repeatable=True)
            dataset = Dataset.model_validate(answer)
            if progress is not None:
                progress(dataset.received, dataset.size)
            if dataset.status == "uploading":
                dataset = self._send(dataset, content, progress, patience_seconds)
        return self.wait(dataset.id) if wait else dataset

    def get(self, dataset_id: str) -> Dataset:
        """The data set with this id. Errors: OctrainError with status 404."""
        return Dataset.model_validate(self._transport.request("GET", _path(dataset_id)))

    def wait(self, dataset_id: str) -> Dataset:
        """The data set when it has been checked. Errors: DatasetInvalid."""
        pause = _PAUSE
        while (dataset := self.get(dataset_id)).status == "checking":
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        if dataset.status == "invalid":
            raise DatasetInvalid(dataset)
        return dataset

    def list(self, *, status: str | None = None, name: str | None = None) -> Iterator[Dataset]:
        """Data sets, the newest first, page by page as they are taken."""
        params: dict[str, Any] = {"status": status, "name": name, "limit": 100}
        while True:
            answer = self._transport.request("GET", "/datasets", params=params)
            for item in answer["items"]:
                yield Dataset.model_validate(item)
            params["cursor"] = answer.get("next_cursor")
            if not params["cursor"]:
                return

    def delete(self, dataset_id: str) -> None:
        """Delete it. Errors: OctrainError (409) while a job that has not ended reads it."""
        self._transport.request("DELETE", _path(dataset_id))

    def _send(
        self, dataset: Dataset, content: BinaryIO, progress: OnUpload | None, patience: float
    ) -> Dataset:
        """Send what is missing; the data set when all of it has arrived."""
        part = min(max(_SMALLEST_PART, -(-dataset.size // _MOST_PARTS)), _LARGEST_PART)
        moved_at, pause = time.monotonic(), _PAUSE
        while dataset.status == "uploading":
            before = dataset.received
            try:
                content.seek(before)
                data = content.read(part)
                if not data:
                    raise OctrainError("The file has become shorter while it was being uploaded.")
                self._transport.request(
                    "PATCH",
                    _path(dataset.id) + "/content",
                    content=data,
                    headers={
                        "Content-Type": "application/octet-stream",
                        "Upload-Offset": str(before),
                    },
                )
                dataset = self.get(dataset.id)
            except (ServerUnreachable, OctrainError) as error:
                if not _passes(error) or time.monotonic() - moved_at > patience:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                dataset = self._look(dataset)
            if dataset.received > before:
                moved_at, pause = time.monotonic(), _PAUSE
                if progress is not None:
                    progress(dataset.received, dataset.size)
        return dataset

    def _look(self, dataset: Dataset) -> Dataset:
        """How much of it has arrived, if the server can be asked."""
        try:
            return self.get(dataset.id)
        except OctrainError as error:
            if not _passes(error):
                raise
            return dataset


def _passes(error: OctrainError) -> bool:
    """Whether trying again may help: no answer, an unwell server, or a part that came already."""
    return (
        error.status in (0, 408, 429)
        or error.status >= 500
        or "offset" in error.type
        or ("upload-complete" in error.type)
    )


def _media_of(file: Path) -> str:
    try:
        return _MEDIA[file.suffix.lower()]
    except KeyError:
        raise OctrainError(
            f"The suffix of {file.name} does not say what it holds: give media as jsonl, text or "
            "parquet."
        ) from None


def _path(dataset_id: str) -> str:
    return f"/datasets/{quote(dataset_id, safe='')}"
