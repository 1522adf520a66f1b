"""Checks of Arrow tables, for Parquet files and data sets of the datasets library."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from fp8core.data.records import (
    Fields,
    RecordChecker,
    check_completion,
    check_messages,
    invalid,
)

__all__ = ["check_schema", "check_table", "checksum"]

_SUMMED_AT_ONCE = 1000


def check_schema(schema: pa.Schema, fields: Fields, name: str) -> None:
    """Raises ``DataInvalid`` unless every column is there and of a type that its field may have."""
    for field, column in fields.columns.items():
        if column not in schema.names:
            present = ", ".join(map(repr, schema.names[:8])) or "none"
            raise invalid(
                name, f"no column {column!r} (columns: {present})", pointer=f"/data/columns/{field}"
            )
        if schema.names.count(column) > 1:
            raise invalid(
                name,
                f"there are {schema.names.count(column)} columns {column!r}",
                pointer=f"/data/columns/{field}",
            )
        type_ = schema.field(column).type
        wanted = _refusal(field, type_)
        if wanted is not None:
            raise invalid(
                name,
                f"column {column!r} has the type {type_}, but {wanted}",
                pointer=f"/data/columns/{field}",
            )


def check_table(
    table: pa.Table,
    checker: RecordChecker,
    where: Callable[[int], str],
    label_names: Sequence[str] | None = None,
) -> None:
    """Check the rows of a table whose schema has passed.

    ``where`` names a row of the table for a person. ``label_names`` are the names of labels that
    are stored as numbers.
    """
    for field, column in checker.fields.columns.items():
        values = table.column(column)
        if values.null_count:
            row = values.is_null().index(True).as_py()
            raise invalid(where(row), f"{column!r} is null")
        try:
            values.validate(full=True)
        except pa.ArrowInvalid as error:
            raise invalid(_rows(where, len(values)), f"{column!r} is damaged: {error}") from None
        if field == "label":
            _note_labels(values, checker, where, label_names)
        elif field in ("messages", "completion"):
            # Each row is looked at; the other fields are checked in full by their type.
            for row, value in enumerate(values):
                _check_value(field, column, value.as_py(), where, row)


def checksum(table: pa.Table, value: int = 0) -> int:
    """The CRC-32 of what ``table`` holds, however it is cut into chunks; goes on from ``value``."""
    for start in range(0, len(table), _SUMMED_AT_ONCE):
        part = table.slice(start, _SUMMED_AT_ONCE)
        copies = [_copied(column) for column in part.columns]
        value = zlib.crc32(pa.record_batch(copies, part.column_names).serialize(), value)
    return value


def _copied(column: pa.ChunkedArray) -> pa.Array:
    """In one piece that holds these rows alone: of a slice the bytes around it would count."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])


def _note_labels(
    values: pa.ChunkedArray,
    checker: RecordChecker,
    where: Callable[[int], str],
    names: Sequence[str] | None,
) -> None:
    for row, value in enumerate(values.to_pylist()):
        if names is not None:
            if not 0 <= value < len(names):
                raise invalid(where(row), f"label {value} is not one of {len(names)} classes")
            value = names[value]
        checker.note_label(value, partial(where, row))


def _check_value(
    field: str, column: str, value: Any, where: Callable[[int], str], row: int
) -> None:
    if field == "messages":
        check_messages(value, column, partial(where, row))
    else:
        check_completion(value, column, partial(where, row))


def _rows(where: Callable[[int], str], count: int) -> str:
    return f"{where(0)} (or one of the {count - 1} rows behind it)" if count > 1 else where(0)


def _refusal(field: str, type_: pa.DataType) -> str | None:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if field == "label":
        fine = _is_text(type_) or pa.types.is_integer(type_)
        return None if fine else "labels are strings or whole numbers"
    if field == "messages":
        fine = _is_list(type_) and pa.types.is_struct(type_.value_type)
        if fine:
            parts = {part.name: part.type for part in type_.value_type}
            fine = all(name in parts and _is_text(parts[name]) for name in ("role", "content"))
        return None if fine else "messages are a list of {role: string, content: string}"
    return None if _is_text(type_) else "this field is a string"


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_)
