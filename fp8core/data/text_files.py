"""Plain text of any size, cut into pieces that fit in memory.

A text without separators may be one document of many gigabytes, which can be neither shuffled nor
split nor tokenized as a whole. So every document longer than a block is cut into pieces of about
equal size at line ends (else at spaces, else between characters). Pieces are what the order and the
split work on; they are separate contexts, and only the last one ends the document.
"""

from __future__ import annotations

import codecs
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fp8core.data.order import Groups
from fp8core.data.records import Record, invalid, unreadable

__all__ = ["MemoryTextSource", "TextFileSource", "block_bytes", "cut"]

_SMALLEST_BLOCK = 4 * 1024
_LARGEST_BLOCK = 64 * 1024
_CHUNK = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Read = Callable[[int, int], bytes]


def block_bytes(total: int) -> int:
    """The longest piece for a corpus of ``total`` bytes.

    64 KiB, less for small corpora, so that an evaluation split has something to choose from: a
    256th, but 4 KiB at least unless that would leave fewer than eight pieces.
    """
    if total < 8 * _SMALLEST_BLOCK:
        return max(16, -(-total // 8))
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, total // 256))


def cut(start: int, stop: int, block: int, read: Read) -> Iterator[int]:
    """Where to cut the document [start, stop), its end included.

    ``read(offset, size)`` gives its bytes. Pieces are at most about ``block`` bytes.
    """
    pieces = -(-(stop - start) // block)
    previous = start
    for index in range(1, pieces):
        target = start + (stop - start) * index // pieces
        lowest = max(previous + 1, target - block // 2)
        window = read(lowest, target - lowest)
        at = _break_in(window)
        if at is None:
            following = read(target, 4)
            # Bytes 10xxxxxx continue a character: the cut goes behind them.
            at = target + next(
                (i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following)
            )
        else:
            at += lowest
        if previous < at < stop:
            yield at
            previous = at
    yield stop


class TextFileSource:
    """``files`` are pairs of a path and its name for a person; ``separator`` parts documents.

    A separator without a line feed is a line of its own; one with a line feed is taken literally.
    Documents of white space alone are skipped.
    """

    groups: Groups | None = None

    def __init__(self, files: Sequence[tuple[Path, str]], separator: str | None) -> None:
        self._files = list(files)
        self._starts = array("Q")
        self._stops = array("Q")
        # Bit 0: begins its document; bit 1: ends it.
        self._edges = bytearray()
        self._first_of_file: list[int] = []
        self.skipped = 0
        block = block_bytes(sum(_size_of(path, name) for path, name in self._files))
        checksum = 0
        for path, name in self._files:
            self._first_of_file.append(len(self._starts))
            checksum = self._index(path, name, separator, block, checksum)
        self.fingerprint = f"text:{len(self._starts)}:{separator!r}:{checksum:08x}"

    def __len__(self) -> int:
        return len(self._starts)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        found: list[Record] = []
        for number in numbers:
            start, stop = self._starts[number], self._stops[number]
            path, name = self._file_of(number)
            try:
                with path.open("rb") as file:
                    data = _pread(file.fileno(), start, stop - start)
            except OSError as error:
                raise unreadable(name, error) from error
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = ""
            if len(data) != stop - start or not text:
                raise invalid(self.where(number), "the file changed since training began")
            edges = self._edges[number]
            found.append(Record({"text": text}, begins=bool(edges & 1), ends=bool(edges & 2)))
        return found

    def where(self, number: int) -> str:
        path, name = self._file_of(number)
        try:
            return f"{name}, line {_line_of(path, self._starts[number])}"
        except OSError:  # it has gone meanwhile
            return name

    def _file_of(self, number: int) -> tuple[Path, str]:
        return self._files[bisect_right(self._first_of_file, number) - 1]

    def _index(
        self, path: Path, name: str, separator: str | None, block: int, checksum: int
    ) -> int:
        first = len(self._starts)
        try:
            with path.open("rb") as file:
                size, checksum = _check_utf8(file.fileno(), path, name, checksum)
                descriptor = file.fileno()
                for start, stop in _documents(descriptor, size, separator):
                    self._add(start, stop, block, partial(_pread, descriptor))
        except OSError as error:
            raise unreadable(name, error) from error
        if len(self._starts) == first:
            if len(self._files) == 1:
                raise invalid(name, "the file is empty" if size == 0 else "the file has no text")
            self.skipped += 1
        return checksum

    def _add(self, start: int, stop: int, block: int, read: Read) -> None:
        if stop - start <= _CHUNK and not read(start, stop - start).strip():
            self.skipped += 1
            return
        at = start
        for end in cut(start, stop, block, read):
            self._starts.append(at)
            self._stops.append(end)
            self._edges.append((at == start) | (end == stop) << 1)
            at = end


class MemoryTextSource:
    """Documents that are in memory already: pairs of a name and a text."""

    groups: Groups | None = None

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        self.skipped = 0
        self._pieces: list[Record] = []
        self._names: list[str] = []
        encoded = [(name, text.encode()) for name, text in documents]
        block = block_bytes(sum(len(data) for _, data in encoded))
        checksum = 0
        for name, data in encoded:
            checksum = zlib.crc32(data, checksum)
            at = 0
            for end in cut(0, len(data), block, partial(_slice, data)):
                fields = {"text": data[at:end].decode()}
                self._pieces.append(Record(fields, begins=at == 0, ends=end == len(data)))
                self._names.append(f"{name}, byte {at + 1}")
                at = end
        self.fingerprint = f"memory:{len(self._pieces)}:{checksum:08x}"

    def __len__(self) -> int:
        return len(self._pieces)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        return [self._pieces[number] for number in numbers]

    def where(self, number: int) -> str:
        return self._names[number]


def _size_of(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(name, error) from error


def _slice(data: bytes, start: int, size: int) -> bytes:
    return data[start : start + size]


def _break_in(window: bytes) -> int | None:
    for mark in (b"\n", b" "):
        found = window.rfind(mark)
        if found >= 0:
            return found + 1
    return None


def _documents(descriptor: int, size: int, separator: str | None) -> Iterator[tuple[int, int]]:
    start = len(_BYTE_ORDER_MARK) if _pread(descriptor, 0, 3) == _BYTE_ORDER_MARK else 0
    if separator is not None:
        mark = separator.encode()
        whole_line = b"\n" not in mark
        for at in _find_all(descriptor, size, mark):
            after = at + len(mark)
            if whole_line:
                # One more byte on each side must be a line end or an end of the file.
                before = _pread(descriptor, at - 1, 1) if at > start else b"\n"
                behind = _pread(descriptor, after, 2)
                if before != b"\n" or (behind[:1] not in (b"", b"\n") and behind != b"\r\n"):
                    continue
                after += len(behind[: behind.find(b"\n") + 1])
            if at < start:
                continue
            if at > start:
                yield start, at
            start = after
    if size > start:
        yield start, size


def _find_all(descriptor: int, size: int, mark: bytes) -> Iterator[int]:
    offset = 0
    carried = b""
    while offset < size:
        chunk = _pread(descriptor, offset, _CHUNK)
        if not chunk:
            return
        data = carried + chunk
        base = offset - len(carried)
        at = data.find(mark)
        while at >= 0:
            yield base + at
            at = data.find(mark, at + 1)
        offset += len(chunk)
        # What may be the beginning of a mark is looked at again with the next chunk.
        carried = data[len(data) - len(mark) + 1 :] if len(mark) > 1 else b""


def _check_utf8(descriptor: int, path: Path, name: str, checksum: int) -> tuple[int, int]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        chunk = _pread(descriptor, offset, _CHUNK)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = offset - pending + error.start
            line = _line_of(path, at)
            raise invalid(
                f"{name}, line {line}", f"not UTF-8 (byte {at + 1} of the file)"
            ) from None
        if not chunk:
            return offset, checksum
        checksum = zlib.crc32(chunk, checksum)
        offset += len(chunk)


def _line_of(path: Path, offset: int) -> int:
    line = 1
    with path.open("rb") as file:
        while offset > 0 and (chunk := file.read(min(offset, _CHUNK))):
            line += chunk.count(b"\n")
            offset -= len(chunk)
    return line


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
