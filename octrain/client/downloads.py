"""Artifact files to disk, each checked against its sha256 before it takes its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from octrain.client.errors import OctrainError
from octrain.client.models import Artifact, ArtifactFile
from octrain.client.transport import Transport

# (path in the artifact, bytes received so far of all files, bytes of all files)
OnProgress = Callable[[str, int, int], None]


def download_artifact(
    transport: Transport,
    job_id: str,
    artifact: Artifact,
    folder: Path,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Fetch every file of the artifact below ``folder`` (made when missing); their paths.

    A file that is there already with the right sha256 is kept. Errors: OctrainError.
    """
    total = sum(file.size for file in artifact.files)
    received = 0
    paths = []
    for file in artifact.files:
        target = _below(folder, file.path)
        paths.append(target)
        if target.is_file() and _sha256(target) == file.sha256:
            received += file.size
        else:
            for count in _fetch(transport, job_id, artifact, file, target):
                received += count
                if on_progress is not None:
                    on_progress(file.path, received, total)
        if on_progress is not None:
            on_progress(file.path, received, total)
    return paths


def _fetch(
    transport: Transport, job_id: str, artifact: Artifact, file: ArtifactFile, target: Path
) -> Iterator[int]:
    """Fetch one file; yields the bytes of each piece."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.part")
    url = f"/jobs/{quote(job_id)}/artifacts/{quote(artifact.id)}/files/{quote(file.path)}"
    digest = hashlib.sha256()
    try:
        with transport.stream(url, read_timeout=60.0) as answer, draft.open("wb") as out:
            for chunk in answer.iter_bytes():
                digest.update(chunk)
                out.write(chunk)
                yield len(chunk)
        if digest.hexdigest() != file.sha256:
            raise OctrainError(f"{file.path} arrived damaged (its sha256 differs). Try again.")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _below(folder: Path, path: str) -> Path:
    """``folder / path``, refused when a server names a place outside the folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise OctrainError(f"The server names a file outside the artifact: {path!r}")
    return folder.joinpath(*parts.parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
