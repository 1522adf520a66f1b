"""Files of the artifact store: what may be registered, reading and writing, through fsspec."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
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


class NewFile:
    """A file on its way into the store: there as a whole, and durable, once `finish` returns.

    Its name is new, or names the same bytes: what stands there is replaced. In a file:// store it
    grows at `draft`, a path of the same folder, which by default lies beside it. Every call blocks.
    """

    def __init__(self, url: str, path: str, *, draft: str | None = None) -> None:
        self.size = 0
        self._local = _local_path(url, path)
        self._draft: Path | None = None
        if self._local is not None:
            name = draft or str(PurePosixPath(path).with_name(f".{secrets.token_hex(8)}"))
            self._draft = _local_path(url, name)
            assert self._draft is not None
            for place in (self._draft, self._local):
                place.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = self._draft.open("xb")
        else:
            self._filesystem, root = fsspec.core.url_to_fs(url)
            self._place = f"{root}/{path}"
            self._file = self._filesystem.open(self._place, "wb")

    def write(self, data: bytes) -> None:
        """Append."""
        self._file.write(data)
        self.size += len(data)

    def finish(self) -> None:
        """Make what was written the file."""
        if self._local is None or self._draft is None:
            self._file.close()
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._local)
        _sync_folders(self._local.parent)

    def discard(self) -> None:
        """Leave nothing, also after `finish`."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._local is None or self._draft is None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm(self._place)
            return
        self._draft.unlink(missing_ok=True)
        self._local.unlink(missing_ok=True)


def open_file(url: str, path: str) -> BinaryIO:
    """A stream of a stored file. Errors: FileNotFoundError. Blocks."""
    filesystem, root = fsspec.core.url_to_fs(url)
    return cast(BinaryIO, filesystem.open(f"{root}/{path}", "rb"))


def remove(url: str, path: str | None = None) -> None:
    """Remove a folder of the store, or a file or folder in it. What is not there is no error."""
    local = _local_path(url, path or "")
    if local is not None:
        if local.is_dir():
            shutil.rmtree(local, ignore_errors=True)
        else:
            local.unlink(missing_ok=True)
        return
    filesystem, root = fsspec.core.url_to_fs(url)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(f"{root}/{path}" if path else root, recursive=True)


def _local_path(url: str, path: str) -> Path | None:
    """Where a file of a file:// store lies, None for other stores."""
    split = urlsplit(url)
    if split.scheme != "file":
        return None
    return Path(unquote(split.path)) / PurePosixPath(path)


def _sync_folders(folder: Path) -> None:
    """Make the names in a folder durable, and its own name, and those of four more above it:
    any of them may have been made a moment ago."""
    for place in (folder, *folder.parents[:5]):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
