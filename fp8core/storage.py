"""ArtifactStore: where models, checkpoints and reports go when they leave the workdir.

A store is a URL and everything below it; ``file:///srv/octrain`` by default, an object store
(``s3://bucket/prefix``) through fsspec where that is installed. A key is a relative POSIX path. A
file is there as a whole or not at all: local files are written beside their place, synced and
renamed; object stores show an object when its upload completes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

import fsspec

from fp8core.durable import PARTIAL_PREFIX, told_when_full, whole_file

__all__ = ["ArtifactStore", "StoredFile", "StoredObject", "sha256_of_file"]

_CHUNK = 1 << 20
# Stores in which an object appears only when it is complete; with others a reader could see half.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})


@dataclass(frozen=True)
class StoredFile:
    """A file that was put: its key, its size in bytes and the sha256 of what was written."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredObject:
    """A file found in the store."""

    key: str
    size: int


def sha256_of_file(path: Path) -> str:
    """The sha256 of a local file, as lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArtifactStore:
    """Files below one URL.

    Raises ``ValueError`` for a URL of a kind that cannot promise whole files, and for a key that
    is absolute, empty or climbs out; ``StorageFull`` when the disk is full; ``FileNotFoundError``
    when a key is not there.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.url = url.rstrip("/")
        self._local: Path | None = None
        if not rest or scheme == "file":
            parts = urlsplit(url)
            if rest and (parts.netloc not in ("", "localhost") or parts.query or parts.fragment):
                # file://srv/octrain would be the folder /octrain.
                raise ValueError(
                    f"{url!r} is not the URL of a folder, which has three slashes "
                    "(file:///srv/octrain), and %23 and %3F for # and ?"
                )
            path = Path(unquote(parts.path) if rest else url)
            if not path.is_absolute():
                raise ValueError(f"a file store needs an absolute path, not {url!r}")
            self._local = path
            self._fs: Any = fsspec.filesystem("file")
            self._root = str(path)
        elif scheme in _OBJECT_STORES:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        else:
            raise ValueError(
                f"{scheme}:// cannot hold artifacts: a reader could see half a file; "
                "use file:// or an object store"
            )

    def put_file(self, source: Path, key: str) -> StoredFile:
        """Copies a local file; replaces what was at ``key``."""
        with source.open("rb") as reader:
            return self._put(reader, key)

    def put_bytes(self, data: bytes, key: str) -> StoredFile:
        """Writes ``data``; replaces what was at ``key``."""
        return self._put(io.BytesIO(data), key)

    def put_folder(self, source: Path, prefix: str) -> list[StoredFile]:
        """Copies every file below a local folder, in the order of their names.

        Raises ``ValueError`` for anything in it that is neither folder nor regular file: a link
        could lead anywhere.
        """
        files = []
        for path in sorted(source.rglob("*")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path} is not a regular file")
            if path.is_file():
                files.append(path)
        return [
            self.put_file(path, f"{prefix}/{path.relative_to(source).as_posix()}") for path in files
        ]

    def get(self, key: str, target: Path, *, sha256: str | None = None) -> StoredFile:
        """Copies ``key`` to a local file, which appears there as a whole.

        Raises ``ValueError`` when its content is not the one that ``sha256`` names.
        """
        with told_when_full(target), self.open(key) as reader, whole_file(target) as writer:
            size, digest = _copy(reader, writer)
            if sha256 is not None and digest != sha256:
                raise ValueError(f"{key}: sha256 is {digest}, not {sha256}")
        return StoredFile(key, size, digest)

    def list(self, prefix: str = "", *, unfinished: bool = False) -> list[StoredObject]:
        """Every file below ``prefix``, by key; with ``unfinished`` also what an interrupted copy
        left under a partial name."""
        place = self._place(prefix) if prefix else self._root
        try:
            found = self._fs.find(place, detail=True)
        except FileNotFoundError:
            return []
        cut = len(self._root.rstrip("/")) + 1
        objects = [
            StoredObject(key=name[cut:], size=int(info["size"]))
            for name, info in found.items()
            if info["type"] == "file"
            and (unfinished or not PurePosixPath(name).name.startswith(PARTIAL_PREFIX))
        ]
        return sorted(objects, key=lambda item: item.key)

    def exists(self, key: str) -> bool:
        """Whether there is a file at ``key``, or any below it."""
        return bool(self._fs.exists(self._place(key)))

    def size(self, key: str) -> int:
        """The size of a file in bytes."""
        return int(self._fs.info(self._place(key))["size"])

    def open(self, key: str) -> BinaryIO:
        """A readable, seekable stream of a file."""
        return cast(BinaryIO, self._fs.open(self._place(key), "rb"))

    def delete(self, key: str) -> None:
        """Removes a file, or all below a prefix; nothing there is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._place(key), recursive=True)

    def _place(self, key: str) -> str:
        parts = key.split("/")
        if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{key!r} is not a key: it must be a relative path without '..'")
        return f"{self._root.rstrip('/')}/{key}"

    def _put(self, reader: Any, key: str) -> StoredFile:
        place = self._place(key)
        if self._local is not None:
            target = Path(place)
            with told_when_full(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(target) as writer:
                    size, digest = _copy(reader, writer)
        else:
            with self._fs.open(place, "wb") as writer:
                size, digest = _copy(reader, writer)
        return StoredFile(key, size, digest)


def _copy(reader: Any, writer: Any) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while chunk := reader.read(_CHUNK):
        writer.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()
