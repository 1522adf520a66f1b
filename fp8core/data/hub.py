"""Data sets of the ``datasets`` library: the hub's, its local cache's, or a local folder's.

The library opens whatever a data set's own files name: the README of a folder or of a hub
repository may list paths and URLs, a saved data set its Arrow files, and any file may be a link.
So what is about to be read is looked at first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fp8core.data.arrow_tables import check_schema, check_table, checksum
from fp8core.data.order import Groups
from fp8core.data.records import Record, RecordChecker, invalid
from fp8core.errors import DataInvalid, SpecRefused, TrainingError
from fp8core.paths import resolve_path

__all__ = ["HubSource"]

_CHECKED_AT_ONCE = 1000
# What ``save_to_disk`` marks its folders with: that of one split, that of several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class HubSource:
    """A split, memory-mapped by ``datasets``; documents are read at random from the page cache.

    ``id`` is a hub id, or the relative path of a folder below the roots (or, without roots, below
    ``base``): one with data files, or one that ``save_to_disk`` wrote.
    """

    groups: Groups | None = None

    def __init__(
        self,
        id: str,
        checker: RecordChecker,
        *,
        name: str | None,
        revision: str | None,
        split: str,
        roots: Sequence[str | os.PathLike[str]] = (),
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        self._fields = checker.fields
        self._name = f"data set {id!r}, split {split!r}"
        self.skipped = 0
        data = _load(id, _local_folder(id, roots, base), name, revision, split, roots)
        columns = list(dict.fromkeys(self._fields.columns.values()))
        table = data.with_format("arrow")
        check_schema(data.features.arrow_schema, self._fields, self._name)
        if len(data) == 0:
            raise invalid(self._name, "the data set has no rows")
        self._label_names: list[str] | None = None
        label = self._fields.columns.get("label")
        if label is not None:
            self._label_names = getattr(data.features[label], "names", None)
        at = content = 0
        for part in table.select_columns(columns).iter(batch_size=_CHECKED_AT_ONCE):
            check_table(part, checker, partial(self._row_name, at), self._label_names)
            content = checksum(part, content)
            at += len(part)
        self._data = data.select_columns(columns)
        schema = str(self._data.features)
        self.fingerprint = f"datasets:{len(data)}:{content:08x}:{schema}"

    def __len__(self) -> int:
        return len(self._data)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        try:
            rows: dict[str, list[Any]] = self._data[list(numbers)]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise invalid(self._name, f"cannot be read any more: {error}") from error
        found: list[Record] = []
        for index in range(len(numbers)):
            row = {column: values[index] for column, values in rows.items()}
            record = self._fields.record(row)
            if self._label_names is not None:
                label = self._label_names[record.fields["label"]]
                record = Record({**record.fields, "label": label})
            found.append(record)
        return found

    def where(self, number: int) -> str:
        return f"{self._name}, row {number + 1}"

    def _row_name(self, first: int, row: int) -> str:
        return self.where(first + row)


def _local_folder(
    id: str, roots: Sequence[str | os.PathLike[str]], base: str | os.PathLike[str] | None
) -> Path | None:
    try:
        found = resolve_path(id, roots, base, pointer="/data/id", missing=DataInvalid)
    except DataInvalid:
        found = None
    if found is not None and found.is_dir():
        return found
    if Path(id).exists():
        # The library would prefer this folder of the working directory to the hub.
        raise SpecRefused(f"{id!r} names a file or folder outside the roots", pointer="/data/id")
    return None


def _load(
    id: str,
    folder: Path | None,
    name: str | None,
    revision: str | None,
    split: str,
    roots: Sequence[str | os.PathLike[str]],
) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if folder is not None and any((folder / mark).is_file() for mark in (_STATE, _SPLITS)):
            return datasets.load_from_disk(str(_saved(folder, split, roots)))
        builder = datasets.load_dataset_builder(
            id if folder is None else str(folder),
            name,
            revision=None if folder is not None else revision,
        )
        for files in (builder.config.data_files or {}).values():
            for file in files:
                _check_file(str(file), folder is not None, roots)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    except TrainingError:
        raise
    except Exception as error:
        # The library and the hub client raise many kinds; none is a fault of this program.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataInvalid(
            f"the data set {id!r} (split {split!r}) cannot be loaded: {reason}", pointer="/data/id"
        ) from error


def _saved(folder: Path, split: str, roots: Sequence[str | os.PathLike[str]]) -> Path:
    """The folder of one split that ``save_to_disk`` wrote, all of whose files may be read."""
    if not (folder / _STATE).is_file():
        splits = _read_json(folder / _SPLITS, roots)["splits"]
        if split not in splits:
            raise ValueError(f"no split {split!r} (splits: {', '.join(map(str, splits))})")
        folder = folder / split
    named = [part["filename"] for part in _read_json(folder / _STATE, roots)["_data_files"]]
    for file in ("dataset_info.json", *named):
        _local_file(folder / file, roots)
    return folder


def _read_json(path: Path, roots: Sequence[str | os.PathLike[str]]) -> Any:
    return json.loads(_local_file(path, roots).read_bytes())


def _check_file(file: str, local: bool, roots: Sequence[str | os.PathLike[str]]) -> None:
    """Raises for a file that a data set names and that may not be read."""
    source = file.rpartition("::")[2]  # zip://inside.csv::archive.zip
    path = source.removeprefix("file://")
    if not local:
        # A repository of the hub that names a path means this machine's, whoever wrote it.
        if not source.startswith("hf://"):
            raise SpecRefused(f"it names {file!r}, which is not on the hub", pointer="/data/id")
    elif "://" not in path:
        _local_file(Path(path), roots)
    elif roots:
        raise SpecRefused(f"it names {file!r}, which is not on this machine", pointer="/data/id")


def _local_file(path: Path, roots: Sequence[str | os.PathLike[str]]) -> Path:
    found = resolve_path(path, roots, pointer="/data/id", missing=DataInvalid)
    if not found.is_file():  # opening a pipe would wait for ever
        raise DataInvalid(f"{path} is not a file", pointer="/data/id")
    return found
