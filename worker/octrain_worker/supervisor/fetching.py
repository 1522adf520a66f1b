"""From the store into an attempt's folder: a checkpoint to go on from, a model to begin with, an
uploaded data set to read.

A checkpoint is downloaded under a partial name, checked file by file against what was registered of
it, and only then given its place in the workdir, where the trainer finds it. One that is torn is
passed over for the one before it. A store that cannot be reached tears nothing: a file that is
missing there counts only where the store itself is seen to be there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8core.errors import DataInvalid, ModelUnavailable
from fp8core.storage import ArtifactStore
from octrain_worker.api_client import DatasetPoint, ModelPoint, ResumePoint

__all__ = [
    "CheckpointTorn",
    "StoreUnreachable",
    "fetch_checkpoint",
    "fetch_dataset",
    "fetch_model",
    "model_bytes",
]

Note = Callable[..., None]
# Files of a checkpoint that only the job itself can go on from.
_TRAINING_STATE = ("optimizer", "engine", "state.json")


class CheckpointTorn(Exception):
    """A checkpoint in the store is not what was registered of it."""


class StoreUnreachable(Exception):
    """The store that a checkpoint or model should lie in is not there, or does not answer."""


def fetch_checkpoint(
    candidates: Sequence[ResumePoint], checkpoints: Path, note: Note
) -> ResumePoint | None:
    """Puts the first whole one of ``candidates`` into ``checkpoints``; which one that was.

    None when none of them is whole: the run then begins at its first step. Raises
    ``StoreUnreachable``, ``StorageFull``, and what the store itself raises.
    """
    for point in candidates:
        try:
            _download(point, checkpoints / f"step-{point.step:08d}")
        except (CheckpointTorn, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError):
                _demand_store(point.url, error)
            message = f"the checkpoint of step {point.step} is torn and is passed over: {error}"
            note("checkpoint_torn", message, artifact_id=point.artifact_id, step=point.step)
            continue
        message = f"the checkpoint of step {point.step} was fetched from the store and verified"
        note("checkpoint_fetched", message, artifact_id=point.artifact_id, step=point.step)
        return point
    if candidates:
        note("no_checkpoint", "no whole checkpoint was found: the run begins at its first step")
    return None


def fetch_model(point: ModelPoint, target: Path) -> None:
    """Puts another job's model into ``target``; of a checkpoint only the model's own files.

    Raises ``ModelUnavailable`` when it is not there or not what was registered,
    ``StoreUnreachable``, ``StorageFull``, and what the store itself raises.
    """
    files = [file for file in point.files if _is_of_model(file)]
    try:
        _download_files(ArtifactStore(point.url), files, target)
    except FileNotFoundError as error:
        _demand_store(point.url, error)
        raise ModelUnavailable(
            f"the model of job {point.job} is no longer in the store: {error}", pointer="/model/job"
        ) from error
    except CheckpointTorn as error:
        raise ModelUnavailable(
            f"the model of job {point.job} is damaged: {error}", pointer="/model/job"
        ) from error


def fetch_dataset(point: DatasetPoint, target: Path) -> None:
    """Puts the file of an uploaded data set into ``target``.

    Raises ``DataInvalid`` when it is not there or not what the spec pins, ``StoreUnreachable``,
    ``StorageFull``, and what the store itself raises.
    """
    files = [{"path": point.path, "sha256": point.sha256}]
    try:
        _download_files(ArtifactStore(point.url), files, target)
    except FileNotFoundError as error:
        _demand_store(point.url, error, kept="owners")
        raise DataInvalid(
            f"the data set {point.dataset} is no longer in the store: {error}",
            pointer="/data/dataset",
        ) from error
    except CheckpointTorn as error:
        raise DataInvalid(
            f"the data set {point.dataset} is damaged: {error}", pointer="/data/dataset"
        ) from error


def model_bytes(files: Sequence[dict[str, Any]]) -> int:
    """The bytes of those files of a checkpoint that are the model itself."""
    return sum(int(file["size"]) for file in files if _is_of_model(file))


def _is_of_model(file: dict[str, Any]) -> bool:
    return not str(file["path"]).startswith(_TRAINING_STATE)


def _demand_store(url: str, missing: Exception, kept: str = "jobs") -> None:
    """Raises ``StoreUnreachable`` unless the store of this artifact is there with jobs in it (or
    what else it keeps): an empty mount point must not make every checkpoint look torn."""
    root, found, _ = url.partition(f"/{kept}/")
    if not found or not ArtifactStore(root).exists(kept):
        raise StoreUnreachable(f"the store {root} is not there, or is empty: {missing}")


def _download(point: ResumePoint, target: Path) -> None:
    store = ArtifactStore(point.url)
    files = point.files
    if not any(entry["path"] == "manifest.json" for entry in files):
        files = [*files, {"path": "manifest.json"}]
    # Sizes first: they cost nothing, and most of what tears a file shows in them.
    for entry in files:
        if "size" in entry:
            size = store.size(_plain(entry))
            if size != int(entry["size"]):
                raise CheckpointTorn(f"{entry['path']} has {size} bytes, not {entry['size']}")
    _download_files(store, files, target)
    _check_manifest(target)


def _download_files(store: ArtifactStore, files: Sequence[dict[str, Any]], target: Path) -> None:
    """All of them in ``target``, verified, or nothing."""
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for entry in files:
            path = _plain(entry)
            place = partial / path
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                store.get(path, place, sha256=entry.get("sha256"))
            except ValueError as error:
                raise CheckpointTorn(str(error)) from error
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plain(entry: dict[str, Any]) -> str:
    """The entry's path. Raises ``CheckpointTorn`` for one that would lead out of the folder."""
    path = str(entry["path"])
    if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
        raise CheckpointTorn(f"its manifest names {path!r}")
    return path


def _check_manifest(folder: Path) -> None:
    """A manifest that is itself unsigned must at least be one: the trainer relies on it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        complete = manifest["complete"] is True
    except (ValueError, KeyError, TypeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointTorn(f"its manifest cannot be read: {error}") from error
    if not complete:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointTorn("its manifest does not say that it is complete")
