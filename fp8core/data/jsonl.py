"""JSON Lines files of any size: one pass to check and index them, then random access.

The pass parses every line, so that a bad one fails the run before training and not after hours; it
keeps 8 bytes a line.
"""

from __future__ import annotations

import json
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8core.data.order import Groups
from fp8core.data.records import Record, RecordChecker, invalid, unreadable
from fp8core.errors import DataInvalid

__all__ = ["JsonlSource"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlSource:
    """``files`` are pairs of a path and its name for a person."""

    groups: Groups | None = None

    def __init__(self, files: Sequence[tuple[Path, str]], checker: RecordChecker) -> None:
        self._files = list(files)
        self._fields = checker.fields
        self._starts = array("Q")
        self._first_of_file: list[int] = []
        self.skipped = 0
        checksum = 0
        for path, name in self._files:
            self._first_of_file.append(len(self._starts))
            checksum = self._index(path, name, checker, checksum)
        self.fingerprint = f"jsonl:{len(self._starts)}:{checksum:08x}"

    def __len__(self) -> int:
        return len(self._starts)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        found: list[Record] = []
        for number in numbers:
            path, name = self._file_of(number)
            try:
                with path.open("rb") as file:
                    file.seek(self._starts[number])
                    line = file.readline()
            except OSError as error:
                raise unreadable(name, error) from error
            try:
                row = json.loads(line.decode())
                RecordChecker(self._fields).check(row, partial(self.where, number))
            except (DataInvalid, ValueError, RecursionError):
                raise invalid(self.where(number), "the line changed since training began") from None
            found.append(self._fields.record(row))
        return found

    def where(self, number: int) -> str:
        path, name = self._file_of(number)
        left = self._starts[number]
        line = 1
        try:
            with path.open("rb") as file:
                while left and (chunk := file.read(min(left, 1 << 20))):
                    line += chunk.count(b"\n")
                    left -= len(chunk)
        except OSError:  # it has gone meanwhile
            return name
        return f"{name}, line {line}"

    def _file_of(self, number: int) -> tuple[Path, str]:
        return self._files[bisect_right(self._first_of_file, number) - 1]

    def _index(self, path: Path, name: str, checker: RecordChecker, checksum: int) -> int:
        offset = 0
        first = len(self._starts)
        columns = self._fields.columns.values()
        keys = {column: json.dumps(column, ensure_ascii=False).encode() for column in columns}
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    checksum = zlib.crc32(line, checksum)
                    start = offset
                    offset += len(line)
                    if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                        start += len(_BYTE_ORDER_MARK)
                        line = line[len(_BYTE_ORDER_MARK) :]
                    if line.isspace() or not line:
                        self.skipped += 1
                        continue
                    place = _Place(name, number)
                    checker.check(_parse(line, place), place)
                    for column, key in keys.items():
                        # Rare enough to look again only where the bytes allow it.
                        if line.count(key) > 1 and _is_repeated(line, column):
                            raise invalid(place(), f"{column!r} is given more than once")
                    self._starts.append(start)
        except OSError as error:
            raise unreadable(name, error) from error
        if len(self._starts) == first:
            raise invalid(name, "the file is empty" if offset == 0 else "the file has no records")
        return checksum


class _Place:
    """A line, named only when something is wrong with it."""

    __slots__ = ("_name", "_number")

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number

    def __call__(self) -> str:
        return f"{self._name}, line {self._number}"


def _parse(line: bytes, place: _Place) -> Any:
    try:
        # Without its end: behind a line feed, columns would be counted anew.
        return json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise invalid(place(), f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except json.JSONDecodeError as error:
        raise invalid(place(), f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of nested brackets.
        raise invalid(place(), f"not acceptable JSON: {error}") from None


def _is_repeated(line: bytes, column: str) -> bool:
    """Whether the object itself has the key twice: of its values the last would be taken."""
    pairs = json.loads(line, object_pairs_hook=lambda pairs: pairs)
    return [key for key, _ in pairs].count(column) > 1
