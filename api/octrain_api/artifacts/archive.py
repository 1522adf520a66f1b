"""A model as one tar file: made while it is sent, the same bytes at every request.

Nothing is written to disk and no file is held in memory. Because every byte's place is known
beforehand, an interrupted download can go on in the middle (`Range`).
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octrain_api.artifacts import store

_BLOCK = 512
_CHUNK = 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file of the store that goes into the archive."""

    name: str
    size: int
    sha256: str
    url: str
    path: str
    local: Path | None

    def open(self) -> BinaryIO:
        """A stream of its bytes. Blocks."""
        if self.local is not None:
            return self.local.open("rb")
        return store.open_file(self.url, self.path)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to, not including, `end`. Blocks.

        Raises FileChanged when the file is no longer as long as it was registered.
        """
        wanted = end - start
        with self.open() as stream:
            if stream.seek(0, io.SEEK_END) != self.size:
                raise FileChanged(f"{self.path} is not as long as it was registered")
            stream.seek(start)
            while wanted > 0:
                chunk = stream.read(min(_CHUNK, wanted))
                if not chunk:
                    raise FileChanged(f"{self.path} ended early")
                wanted -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class TextFile:
    """A file that is made for the archive."""

    name: str
    content: bytes


class FileChanged(Exception):
    """A stored file is shorter or longer than it was registered."""


class TarArchive:
    """An uncompressed POSIX (pax) archive of these files below one folder.

    `modified` is the time, in Unix seconds, that all entries carry.
    """

    def __init__(
        self, folder: str, files: Sequence[StoredFile | TextFile], *, modified: int
    ) -> None:
        self._parts: list[bytes | StoredFile] = []
        digest = hashlib.sha256()
        for file in files:
            size = file.size if isinstance(file, StoredFile) else len(file.content)
            entry = tarfile.TarInfo(f"{folder}/{file.name}")
            entry.size, entry.mtime, entry.mode = size, modified, 0o644
            header = entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            self._parts.append(header)
            digest.update(header)
            if isinstance(file, StoredFile):
                self._parts.append(file)
                digest.update(file.sha256.encode())
            else:
                self._parts.append(file.content)
                digest.update(file.content)
            self._parts.append(b"\0" * (-size % _BLOCK))
        self._parts.append(b"\0" * (2 * _BLOCK))
        self.size = sum(_size(part) for part in self._parts)
        self.etag = f'"{digest.hexdigest()[:32]}"'

    def read(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` up to, not including, `end`. Blocks.

        Raises FileChanged when a stored file is no longer as long as it was registered.
        """
        left = (self.size if end is None else end) - start
        for part in self._parts:
            size = _size(part)
            if start >= size:
                start -= size
                continue
            if left <= 0:
                return
            wanted = min(size - start, left)
            if isinstance(part, bytes):
                yield part[start : start + wanted]
            else:
                yield from part.read(start, start + wanted)
            left -= wanted
            start = 0


def _size(part: bytes | StoredFile) -> int:
    return part.size if isinstance(part, StoredFile) else len(part)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The one byte range that a Range header asks for, as (start, end); None for the whole.

    Headers that are not understood, and several ranges, ask for the whole (RFC 9110, 14.2).
    Raises ValueError for a range that begins behind the end.
    """
    if header is None or not header.startswith("bytes=") or "," in header:
        return None
    first, dash, last = header.removeprefix("bytes=").strip().partition("-")
    digits = all(part.isdecimal() and part.isascii() for part in (first, last) if part)
    if not dash or not digits:
        return None
    if first == "":
        if last == "":
            return None
        if int(last) == 0:
            raise ValueError("an empty range")
        return max(size - int(last), 0), size
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size:
        raise ValueError(f"the range begins at {start}, and there are {size} bytes")
    return start, min(int(last) + 1 if last else size, size)
