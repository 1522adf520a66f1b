"""Files to disk: an artifact's files, each checked against its sha256 before it takes its name, and
the model as one archive, which goes on where it broke off.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from octrain.client.errors import DownloadDamaged, OctrainError, ServerUnreachable, may_pass
from octrain.client.models import Artifact, ArtifactFile
from octrain.client.session import Session

# (path in the artifact, bytes received so far of all files, bytes of all files)
OnProgress = Callable[[str, int, int], None]

_READ_TIMEOUT = 60.0
_RESUMPTIONS = 5


async def download_artifact(
    session: Session,
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
        if target.is_file() and await session.exchange.work(partial(_sha256, target)) == (
            file.sha256
        ):
            received += file.size
        else:
            async for count in _fetch(session, job_id, artifact, file, target):
                received += count
                if on_progress is not None:
                    on_progress(file.path, received, total)
        if on_progress is not None:
            on_progress(file.path, received, total)
    return paths


async def download_archive(
    session: Session, path: str, target: Path, on_progress: OnProgress | None = None
) -> Path:
    """Fetch a file that never changes under its ETag into ``target``; its path.

    What an earlier call left in ``.NAME.part`` is gone on with, when it is of the same ETag: a
    break costs only what had not arrived. Errors: OctrainError, ServerUnreachable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.part")
    tag = draft.with_name(f"{draft.name}.etag")
    broken = 0
    while True:
        before = draft.stat().st_size if draft.exists() else 0
        try:
            total = await _fetch_rest(session, path, draft, tag, target.name, on_progress)
            break
        except ServerUnreachable:
            after = draft.stat().st_size if draft.exists() else 0
            broken = 0 if after > before else broken + 1
            if broken > _RESUMPTIONS:
                raise
            await session.exchange.sleep(_pause(broken))
    if draft.stat().st_size != total:
        draft.unlink()
        tag.unlink(missing_ok=True)
        raise DownloadDamaged(f"{target.name} arrived with the wrong length. Try again.")
    os.replace(draft, target)
    tag.unlink(missing_ok=True)
    return target


async def _fetch_rest(
    session: Session,
    path: str,
    draft: Path,
    tag: Path,
    name: str,
    on_progress: OnProgress | None,
) -> int:
    """Append what is missing to the draft; the whole length in bytes."""
    have = draft.stat().st_size if draft.exists() and tag.exists() else 0
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text(encoding="utf-8")}
    async with session.stream(
        path, headers=headers, read_timeout=_READ_TIMEOUT, also=(416,)
    ) as body:
        answer = body.answer
        if answer.status_code == 416:
            # Nothing is missing: an earlier call broke off between the last byte and the name.
            return int(answer.headers.get("Content-Range", "").rpartition("/")[2] or 0)
        if answer.status_code != 206:
            have = 0
        total = have + int(answer.headers.get("Content-Length", 0))
        etag = answer.headers.get("ETag")
        if etag is not None:
            tag.write_text(etag, encoding="utf-8")
        with draft.open("ab" if have else "wb") as out:
            async for chunk in body.chunks():
                out.write(chunk)
                have += len(chunk)
                if on_progress is not None:
                    on_progress(name, have, total)
        return total


async def _fetch(
    session: Session, job_id: str, artifact: Artifact, file: ArtifactFile, target: Path
) -> AsyncIterator[int]:
    """Fetch one file; yields the bytes of each piece, and takes them back where a server that
    knows no ranges begins anew after a break."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.part")
    url = f"/jobs/{quote(job_id)}/artifacts/{quote(artifact.id)}/files/{quote(file.path)}"
    digest, have, broken = hashlib.sha256(), 0, 0
    try:
        with draft.open("wb") as out:
            while True:
                before = have
                headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
                if have:
                    headers |= {"Range": f"bytes={have}-", "If-Range": f'"{file.sha256}"'}
                try:
                    async with session.stream(
                        url, headers=headers, read_timeout=_READ_TIMEOUT
                    ) as body:
                        if have and body.answer.status_code != 206:
                            yield -have
                            digest, have = hashlib.sha256(), 0
                            out.seek(0)
                            out.truncate()
                        async for chunk in body.chunks():
                            digest.update(chunk)
                            out.write(chunk)
                            have += len(chunk)
                            yield len(chunk)
                    break
                except OctrainError as error:
                    broken = 0 if have > before else broken + 1
                    if broken > _RESUMPTIONS or not may_pass(error):
                        raise
                    if have and have >= file.size:
                        break
                    await session.exchange.sleep(_pause(broken))
        if digest.hexdigest() != file.sha256:
            raise DownloadDamaged(f"{file.path} arrived damaged (its sha256 differs). Try again.")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _pause(broken: int) -> float:
    """Seconds before the next try, after so many without a byte."""
    return min(0.25 * 2.0**broken, 5.0)


def _below(folder: Path, path: str) -> Path:
    """``folder / path``, refused when a server names a place outside the folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise OctrainError(f"The server names a file outside the artifact: {path!r}")
    return folder.joinpath(*parts.parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
