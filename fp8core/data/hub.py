"""Data sets of the ``datasets`` library: the hub's, its local cache's, or a local folder's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8core.data.arrow_tables import check_schema, check_table
from fp8core.data.order import Groups
from fp8core.data.records import Record, RecordChecker, invalid
from fp8core.errors import DataInvalid, SpecRefused
from fp8core.paths import resolve_path

__all__ = ["HubSource"]

_CHECKED_AT_ONCE = 1000


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
        data = _load(id, _local_folder(id, roots, base), name, revision, split)
        columns = list(self._fields.columns.values())
        table = data.with_format("arrow")
        check_schema(data.features.arrow_schema, self._fields, self._name)
        if len(data) == 0:
            raise invalid(self._name, "the data set has no rows")
        self._label_names: list[str] | None = None
        label = self._fields.columns.get("label")
        if label is not None:
            self._label_names = getattr(data.features[label], "names", None)
        at = 0
        for part in table.select_columns(columns).iter(batch_size=_CHECKED_AT_ONCE):
            check_table(part, checker, partial(self._row_name, at), self._label_names)
            at += len(part)
        self._data = data.select_columns(columns)
        schema = str(self._data.features)
        self.fingerprint = f"datasets:{len(data)}:{id}:{name}:{revision}:{split}:{schema}"

    def __len__(self) -> int:
        return len(self._data)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        rows: dict[str, list[Any]] = self._data[list(numbers)]
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


def _load(id: str, folder: Path | None, name: str | None, revision: str | None, split: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    saved = folder is not None and any(
        (folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")
    )
    try:
        if folder is not None and saved:
            data = datasets.load_from_disk(str(folder))
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise ValueError(f"no split {split!r} (splits: {', '.join(data)})")
                data = data[split]
            return data
        return datasets.load_dataset(
            id if folder is None else str(folder),
            name,
            split=split,
            revision=None if folder is not None else revision,
        )
    except Exception as error:
        # The library and the hub client raise many kinds; none is a fault of this program.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataInvalid(
            f"the data set {id!r} (split {split!r}) cannot be loaded: {reason}", pointer="/data/id"
        ) from error
