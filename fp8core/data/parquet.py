"""Parquet files, read a row group at a time.

Opening reads the wanted columns once, group by group, so that a null or a bad message fails the
run before training. Afterwards the groups in use are kept up to a bound of bytes; the order of
documents (``order.EpochOrder``) is made so that each group is read about once an epoch.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fp8core.data.arrow_tables import check_schema, check_table, checksum
from fp8core.data.order import Groups
from fp8core.data.records import Record, RecordChecker, invalid, unreadable

__all__ = ["ParquetSource"]

WINDOW_BYTES = 256 * 1024 * 1024


class ParquetSource:
    """``files`` are pairs of a path and its name for a person.

    At most about twice ``window_bytes`` of unpacked columns are held, or one row group where a
    single one is larger than that.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, str]],
        checker: RecordChecker,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._files = list(files)
        self._fields = checker.fields
        self._columns = list(dict.fromkeys(checker.fields.columns.values()))
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self._limit = 2 * window_bytes
        self._opened: tuple[int, pq.ParquetFile] | None = None
        self._footers: list[int] = []
        # One entry per row group of all files.
        self._places: list[tuple[int, int, int]] = []
        starts: list[int] = []
        sizes: list[int] = []
        total = 0
        content = 0
        self.skipped = 0
        for file_index, (path, name) in enumerate(self._files):
            file = _open(path, name)
            check_schema(file.schema_arrow, self._fields, name)
            footer = _footer(path, name)
            self._footers.append(zlib.crc32(footer))
            content = zlib.crc32(footer, content)
            row = 0
            for group in range(file.metadata.num_row_groups):
                description = file.metadata.row_group(group)
                if description.num_rows == 0:
                    continue
                table = _read(file, group, self._columns, name)
                if len(table) != description.num_rows:
                    raise invalid(
                        f"{name}, row group {group}",
                        f"damaged: {len(table)} rows, not {description.num_rows}",
                    )
                check_table(table, checker, partial(_row_name, name, row))
                content = checksum(table, content)
                self._places.append((file_index, group, row))
                starts.append(total)
                sizes.append(table.nbytes)
                total += description.num_rows
                row += description.num_rows
            if row == 0:
                raise invalid(name, "the file has no rows")
        self._length = total
        self._starts = np.array(starts, dtype=np.int64)
        self.groups: Groups | None = Groups(
            self._starts, np.array(sizes, dtype=np.int64), window_bytes
        )
        self.fingerprint = f"parquet:{total}:{content:08x}"

    def __len__(self) -> int:
        return self._length

    def records(self, numbers: Sequence[int]) -> list[Record]:
        found: list[Record] = []
        for number in numbers:
            group = self._group_of(number)
            table = self._table(group)
            row = number - int(self._starts[group])
            fields = {
                field: table.column(column)[row].as_py()
                for field, column in self._fields.columns.items()
            }
            found.append(Record(fields))
        return found

    def where(self, number: int) -> str:
        group = self._group_of(number)
        file_index, _, first_row = self._places[group]
        row = first_row + number - int(self._starts[group]) + 1
        return f"{self._files[file_index][1]}, row {row}"

    def _group_of(self, number: int) -> int:
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _table(self, group: int) -> pa.Table:
        table = self._cache.get(group)
        if table is None:
            file_index, index, _ = self._places[group]
            file, name = self._open(file_index)
            table = _read(file, index, self._columns, name).combine_chunks()
            self._cache[group] = table
            while len(self._cache) > 1 and self._cached_bytes() > self._limit:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return table

    def _open(self, file_index: int) -> tuple[pq.ParquetFile, str]:
        # The file in use stays open: reading its footer takes longer than a small row group.
        path, name = self._files[file_index]
        if self._opened is None or self._opened[0] != file_index:
            file = _open(path, name)
            if zlib.crc32(_footer(path, name)) != self._footers[file_index]:
                raise invalid(name, "the file changed since training began")
            self._opened = file_index, file
        return self._opened[1], name

    def _cached_bytes(self) -> int:
        return sum(table.nbytes for table in self._cache.values())


def _row_name(name: str, first: int, row: int) -> str:
    return f"{name}, row {first + row + 1}"


def _open(path: Path, name: str) -> pq.ParquetFile:
    try:
        if path.stat().st_size == 0:
            raise invalid(name, "the file is empty")
        file = pq.ParquetFile(path)
        # Types that Arrow does not have, and names that are not UTF-8, fail only here.
        file.schema_arrow.names  # noqa: B018
        return file
    except (pa.ArrowException, ValueError) as error:
        raise invalid(name, f"not a readable Parquet file: {_first_line(error)}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else _first_line(error)
        raise invalid(name, f"cannot be read: {reason}") from None


def _read(file: pq.ParquetFile, group: int, columns: list[str], name: str) -> pa.Table:
    try:
        return file.read_row_group(group, columns=columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise invalid(f"{name}, row group {group}", f"damaged: {_first_line(error)}") from None


def _footer(path: Path, name: str) -> bytes:
    """The file's own description: schema, row groups, offsets, sizes and statistics."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(0, size - 8 - length))
            return file.read(length)
    except OSError as error:
        raise unreadable(name, error) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
