"""Artifacts where they lie: what may be registered, and reading it back, through fsspec."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import fsspec

from octrain_api.problems import Problem, ProblemError

_CHUNK = 1 << 20


def _refuse(pointer: str, message: str) -> Problem:
    return Problem(
        422,
        "request-invalid",
        "Request not valid",
        message,
        errors=[ProblemError(pointer=pointer, message=message, code="artifact_place")],
    )


def _unsafe(path: str) -> bool:
    """Whether a relative POSIX path is absolute, climbs out, or is not written plainly."""
    parts = path.split("/")
    return "\x00" in path or "\\" in path or any(part in ("", ".", "..") for part in parts)


def check_registration(
    url: str, paths: Sequence[str], *, stores: Sequence[str], prefix: str
) -> None:
    """Refuse files that do not lie in the attempt's own folder of a known store (422)."""
    below = None
    for store in stores:
        base = f"{store.rstrip('/')}/{prefix}"
        if store and (url.rstrip("/") == base or url.startswith(base + "/")):
            below = url[len(base) :].strip("/")
            break
    if below is None:
        raise _refuse("/url", f"The artifact must lie below {prefix} of the artifact store.")
    if below and _unsafe(unquote(below)):
        raise _refuse("/url", "The artifact's URL must be written without '.', '..' and '//'.")
    for index, path in enumerate(paths):
        if _unsafe(path):
            raise _refuse(f"/files/{index}/path", f"{path!r} is not a plain relative path.")


def local_file(url: str, path: str, root_url: str) -> Path | None:
    """The local file of an artifact in a file:// store, None when it is not there.

    Symlinks are resolved, and what then lies outside the store is not there.
    """
    split = urlsplit(url)
    if split.scheme != "file" or not root_url.startswith("file:"):
        return None
    root = Path(unquote(urlsplit(root_url).path)).resolve()
    candidate = (Path(unquote(split.path)) / PurePosixPath(path)).resolve()
    if not candidate.is_relative_to(root) or not candidate.is_file():
        return None
    return candidate


def exists(url: str, path: str) -> bool:
    """Whether a file of an artifact in an object store is there. Blocks."""
    filesystem, root = fsspec.core.url_to_fs(url)
    return bool(filesystem.isfile(f"{root}/{path}"))


def read(url: str, path: str) -> Iterator[bytes]:
    """The bytes of a file of an artifact in an object store. Blocks."""
    filesystem, root = fsspec.core.url_to_fs(url)
    with filesystem.open(f"{root}/{path}", "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
