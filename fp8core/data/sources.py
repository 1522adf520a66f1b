"""From the ``data`` part of a spec to a source of checked documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.data.jsonl import JsonlSource
from fp8core.data.records import DocumentSource, Fields, RecordChecker, invalid, unreadable
from fp8core.data.text_files import MemoryTextSource, TextFileSource
from fp8core.errors import DataInvalid, SpecRefused
from fp8core.paths import resolve_path

__all__ = ["OpenedSource", "open_source"]

_SUFFIX = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}


@dataclass(frozen=True)
class OpenedSource:
    """A source, and what its check noted (the labels)."""

    source: DocumentSource
    checker: RecordChecker


def open_source(
    data: Any,
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    base_folder: str | os.PathLike[str] | None = None,
    upload_folder: str | os.PathLike[str] | None = None,
) -> OpenedSource:
    """Open and check everything that ``data`` (``JobSpec.data``) names.

    Raises ``DataInvalid`` with file and line (or row) for bad data, ``SpecRefused`` for a path
    outside ``roots`` or a format that the source cannot have. ``upload_folder`` is where the files
    of an uploaded data set lie.
    """
    checker = RecordChecker(Fields.of(data.format, data.columns))
    if data.source == "builtin":
        _only_text(data.format, "built-in text")
        return OpenedSource(_builtin(data.name), checker)
    if data.source == "huggingface":
        from fp8core.data.hub import HubSource

        source = HubSource(
            data.id,
            checker,
            name=data.name,
            revision=data.revision,
            split=data.split,
            roots=roots,
            base=base_folder,
        )
        return OpenedSource(source, checker)
    if data.source == "upload":
        if upload_folder is None:
            raise SpecRefused(
                f"the upload {data.dataset!r} is not on this machine", pointer="/data/dataset"
            )
        folder = Path(os.path.realpath(upload_folder))
        kind = _kind_of_upload(folder, data.dataset)
        files = _files(folder, data.dataset, _SUFFIX[kind], [folder], "/data/dataset")
        separator = None
    else:
        kind = data.source
        path = resolve_path(
            data.path, roots, base_folder, pointer="/data/path", missing=DataInvalid
        )
        files = _files(path, data.path, _SUFFIX[kind], roots, "/data/path")
        separator = data.document_separator if kind == "text" else None
    if kind == "text":
        _only_text(data.format, "plain text")
        return OpenedSource(TextFileSource(files, separator), checker)
    if kind == "jsonl":
        return OpenedSource(JsonlSource(files, checker), checker)
    from fp8core.data.parquet import ParquetSource

    return OpenedSource(ParquetSource(files, checker), checker)


def _builtin(name: str) -> DocumentSource:
    if name != "python_topics":
        raise SpecRefused(f"no built-in text {name!r}", pointer="/data/name")
    from pydoc_data.topics import topics

    return MemoryTextSource([(f"topic {topic!r}", topics[topic]) for topic in sorted(topics)])


def _only_text(format: str, source: str) -> None:
    if format != "text":
        raise SpecRefused(
            f"{source} has no fields: the format {format!r} needs jsonl, parquet or a data set",
            pointer="/data/format",
        )


def _files(
    path: Path,
    shown: str,
    suffix: str,
    roots: Sequence[str | os.PathLike[str]],
    pointer: str,
) -> list[tuple[Path, str]]:
    """The file itself, or every file of the suffix below the folder, sorted by name."""
    if path.is_file():
        return [(path, shown)]
    if not path.is_dir():
        raise DataInvalid(f"{shown}: neither a file nor a folder", pointer=pointer)
    found = _below(path, suffix, shown, pointer)
    if not found:
        raise invalid(shown, f"the folder holds no {suffix} file", pointer=pointer)
    files: list[tuple[Path, str]] = []
    for entry in found:
        name = str(Path(shown) / entry.relative_to(path))
        # A link below the folder may lead anywhere, so each file is checked by itself.
        file = resolve_path(entry, roots, pointer=pointer, missing=DataInvalid)
        if not file.is_file():  # opening a pipe would wait for ever
            raise DataInvalid(f"{name}: neither a file nor a folder", pointer=pointer)
        files.append((file, name))
    return files


def _below(folder: Path, suffix: str, shown: str, pointer: str) -> list[Path]:
    """Sorted by name. Folders that are links are not gone into: they could lead in a circle."""

    def fail(error: OSError) -> None:
        # Left out in silence, its files would be missing from the data.
        place = Path(shown) / Path(error.filename or folder).relative_to(folder)
        raise unreadable(str(place), error, pointer=pointer) from error

    return sorted(
        Path(place, name)
        for place, _, names in os.walk(folder, onerror=fail)
        for name in names
        if name.endswith(suffix)
    )


def _kind_of_upload(folder: Path, shown: str) -> str:
    kinds = [
        kind for kind, suffix in _SUFFIX.items() if _below(folder, suffix, shown, "/data/dataset")
    ]
    if len(kinds) != 1:
        found = " and ".join(_SUFFIX[kind] for kind in kinds) or "none of them"
        raise invalid(
            f"upload {shown!r}",
            f"needs files of one kind (.txt, .jsonl or .parquet), found {found}",
            pointer="/data/dataset",
        )
    return kinds[0]
