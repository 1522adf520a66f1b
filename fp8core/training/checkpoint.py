"""Checkpoints: whole or absent, verified before they are believed, safetensors and JSON only.

A checkpoint is a folder ``step-00000200`` of tensors, ``state.json`` and ``manifest.json``, which
names every other file with its size and sha256 and is written last. The folder is filled under a
temporary name and renamed when all of it is on disk, so that neither a crash nor a full disk can
leave half of one under its own name.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8core.durable import PARTIAL_PREFIX, sync_file, sync_folder, told_when_full
from fp8core.errors import CheckpointCorrupt
from fp8core.storage import sha256_of_file
from fp8core.training.tensor_files import read_tensors, write_tensors

__all__ = ["CheckpointStore", "LoadedCheckpoint", "SavedCheckpoint", "Skipped", "verify"]

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "manifest.json"
_STATE = "state.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in its place. ``metric``: the evaluation loss at its step, if there was one."""

    step: int
    path: Path
    metric: float | None


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that does not verify, and why."""

    step: int
    path: Path
    reason: str


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose every byte has been verified."""

    step: int
    path: Path
    state: dict[str, Any]

    def tensors(self, stem: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors saved as ``stem``, on the CPU, one at a time."""
        return read_tensors(self.path, stem)


class CheckpointStore:
    """The checkpoints of one workdir, below ``folder``. One process writes at a time."""

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self.folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        # Names of what `load_newest` found not to verify: none of it counts as a checkpoint.
        self._damaged: set[str] = set()
        with told_when_full(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._clear()

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        metric: float | None,
        extra: Path | None = None,
    ) -> SavedCheckpoint:
        """Writes the checkpoint of ``step``; one that is already there is replaced.

        ``tensors``: by file stem. ``state``: JSON values. ``extra``: a folder whose files go along
        (config and tokenizer, so that the checkpoint is a model of its own). Raises
        ``StorageFull``; whatever is raised, earlier checkpoints are there as they were.
        """
        target = self.folder / f"step-{step:08d}"
        partial = self._unnamed()
        try:
            with told_when_full(target):
                partial.mkdir()
                if extra is not None:
                    shutil.copytree(extra, partial, dirs_exist_ok=True)
                for stem, named in tensors.items():
                    write_tensors(partial, stem, named)
                _write(partial / _STATE, dict(state))
                files = sorted(path for path in partial.rglob("*") if path.is_file())
                for path in files:
                    sync_file(path)
                for folder in (path for path in partial.rglob("*") if path.is_dir()):
                    sync_folder(folder)
                manifest = {
                    "complete": True,
                    "format": FORMAT,
                    "step": step,
                    "metric": metric,
                    "files": [_entry(partial, path) for path in files],
                }
                _write(partial / _MANIFEST, manifest)
                sync_file(partial / _MANIFEST)
                sync_folder(partial)
                self._move_into_place(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._damaged.discard(target.name)
        return SavedCheckpoint(step, target, metric)

    def saved(self) -> list[SavedCheckpoint]:
        """Every checkpoint with a readable manifest, oldest first; files are not verified.

        Without those that ``load_newest`` has found to be damaged.
        """
        found = []
        for step, path in self._folders():
            if path.name in self._damaged:
                continue
            with contextlib.suppress(ValueError):
                found.append(SavedCheckpoint(step, path, _read_manifest(path, step).get("metric")))
        return found

    def best(self) -> SavedCheckpoint | None:
        """The checkpoint of the lowest metric; of equals the earlier."""
        measured = self._by_metric(self.saved())
        return measured[0] if measured else None

    def among_best(self, metric: float) -> bool:
        """Whether a checkpoint of this metric would be one of the best that are kept."""
        measured = self._by_metric(self.saved())[: self._keep_best]
        if self._keep_best == 0:
            return False
        return len(measured) < self._keep_best or metric < _metric_of(measured[-1])

    def prune(self) -> list[SavedCheckpoint]:
        """Removes what is neither among the newest nor among the best; returns what it removed.

        A damaged one takes no other's place, and goes once a later step has been saved.
        """
        self._clear()
        found = self.saved()
        kept = {item.step for item in found[-self._keep_last :]}
        kept |= {item.step for item in self._by_metric(found)[: self._keep_best]}
        removed = [item for item in found if item.step not in kept]
        newest = found[-1].step if found else -1
        removed += [
            SavedCheckpoint(step, path, None)
            for step, path in self._folders()
            if path.name in self._damaged and step < newest
        ]
        for item in removed:
            self._remove(item.path)
            self._damaged.discard(item.path.name)
        return removed

    def load_newest(self) -> tuple[LoadedCheckpoint | None, list[Skipped]]:
        """The newest checkpoint that verifies, and the newer ones that do not.

        None where there is no checkpoint at all. Raises ``CheckpointCorrupt`` where there are some
        and none verifies: starting over would silently throw the work away.
        """
        skipped: list[Skipped] = []
        for step, path in reversed(self._folders()):
            try:
                verify(path, step)
                state = json.loads((path / _STATE).read_bytes())
                if not isinstance(state, dict):
                    raise ValueError(f"{_STATE} is not a JSON object")
            except (ValueError, OSError) as error:
                self._damaged.add(path.name)
                skipped.append(Skipped(step, path, str(error)))
                continue
            return LoadedCheckpoint(step, path, state), skipped
        if skipped:
            reasons = "; ".join(f"{item.path.name}: {item.reason}" for item in skipped)
            raise CheckpointCorrupt(
                f"none of the checkpoints in {self.folder} verifies ({reasons}); "
                "restore one from a copy, or start over in another workdir"
            )
        return None, []

    @staticmethod
    def verified_elsewhere(folder: Path, step: int) -> LoadedCheckpoint:
        """The checkpoint of ``step`` below ``folder``, which another rank has verified."""
        path = folder / f"step-{step:08d}"
        return LoadedCheckpoint(step, path, json.loads((path / _STATE).read_bytes()))

    def _folders(self) -> list[tuple[int, Path]]:
        found = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
        return sorted(found)

    @staticmethod
    def _by_metric(found: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
        measured = [item for item in found if item.metric is not None]
        return sorted(measured, key=lambda item: (_metric_of(item), item.step))

    def _move_into_place(self, partial: Path, target: Path) -> None:
        replaced = None
        if target.exists():
            replaced = self._unnamed()
            target.rename(replaced)
        try:
            partial.rename(target)
        except BaseException:
            if replaced is not None:
                replaced.rename(target)
            raise
        sync_folder(self.folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        # Renamed first: a crash while deleting must not leave half a checkpoint under its name.
        # What cannot be deleted yet (NFS keeps files that somebody still reads) ends no run: the
        # next call clears it.
        doomed = self._unnamed()
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clear(self) -> None:
        """Deletes what has no name: of a crash, or of a deletion that did not succeed."""
        for left_over in self.folder.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def _unnamed(self) -> Path:
        return self.folder / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"


def verify(path: Path, step: int | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint folder, after every file has been compared with it.

    Raises ``ValueError`` that names the first file that is missing, of another size or of another
    sha256; for a tensor file that the manifest does not name; and for a manifest that is missing,
    torn or of another step.
    """
    manifest = _read_manifest(path, step)
    named = {entry["path"] for entry in manifest["files"]}
    for found in sorted(path.glob("*.safetensors")):
        if found.name not in named:
            raise ValueError(f"{found.name} is not named by {_MANIFEST}")
    for entry in manifest["files"]:
        file = path / entry["path"]
        if not file.is_file():
            raise ValueError(f"{entry['path']} is missing")
        if file.stat().st_size != entry["size"]:
            raise ValueError(
                f"{entry['path']} has {file.stat().st_size} bytes, not {entry['size']}"
            )
        if sha256_of_file(file) != entry["sha256"]:
            raise ValueError(f"{entry['path']} is damaged: its sha256 differs")
    return manifest


def _read_manifest(path: Path, step: int | None) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
    except OSError as error:
        raise ValueError(f"{_MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_MANIFEST} is not JSON") from error
    if not isinstance(manifest, dict) or manifest.get("complete") is not True:
        raise ValueError(f"{_MANIFEST} does not say that the checkpoint is complete")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"format {manifest.get('format')!r} is not known to this version")
    if step is not None and manifest.get("step") != step:
        raise ValueError(f"{_MANIFEST} is of step {manifest.get('step')}")
    files = manifest.get("files")
    if not isinstance(files, list) or not all(map(_is_entry, files)):
        raise ValueError(f"{_MANIFEST} does not list its files as it should")
    metric = manifest.get("metric")
    if metric is not None and type(metric) not in (int, float):
        raise ValueError(f"{_MANIFEST} has the metric {metric!r}, which is no number")
    if _STATE not in {entry["path"] for entry in files}:
        raise ValueError(f"{_MANIFEST} does not name {_STATE}")
    return manifest


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("path"), str)
        and _is_below(entry["path"])
        and isinstance(entry.get("sha256"), str)
        and type(entry.get("size")) is int
    )


def _is_below(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/")) and "\0" not in name


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    return {
        "path": path.relative_to(folder).as_posix(),
        "size": path.stat().st_size,
        "sha256": sha256_of_file(path),
    }


def _metric_of(item: SavedCheckpoint) -> float:
    assert item.metric is not None
    return item.metric


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False))
