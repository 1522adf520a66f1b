"""What must be in place before a trainer begins: its spec, the model of another job that it begins
with, and the checkpoint it goes on from.

A checkpoint is downloaded under a partial name, checked file by file against its manifest, and only
then given its place in the workdir, where the trainer finds it. One that is torn is passed over for
the one before it in the same store.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp8core.errors import ModelUnavailable, TrainingError
from fp8core.spec.outcomes import Reason
from fp8core.storage import ArtifactStore
from octrain_worker.api_client import Claim, ModelPoint, ResumePoint
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.settings import WorkerSettings

__all__ = ["CheckpointTorn", "Preparation", "fetch_checkpoint", "fetch_model", "trainer_order"]

logger = logging.getLogger(__name__)

Note = Callable[..., None]
# Files of a checkpoint that only the job itself can go on from.
_TRAINING_STATE = ("optimizer", "engine", "state.json")


class CheckpointTorn(Exception):
    """A checkpoint in the store is not what its manifest says."""


class Preparation:
    """Runs in a thread of its own, so that cancel and lease are obeyed during a long download."""

    def __init__(
        self, folder: AttemptFolder, claim: Claim, note: Note, poke: Callable[[], None]
    ) -> None:
        self.error: TrainingError | None = None
        self.done = False
        self._folder = folder
        self._claim = claim
        self._note = note
        self._poke = poke
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            write_private(self._folder.spec, self._claim.spec)
            model = self._claim.spec.get("model") or {}
            if self._claim.model_from is not None:
                fetch_model(self._claim.model_from, self._folder.model)
            elif model.get("source") == "job":
                raise ModelUnavailable(
                    f"job {model.get('job')} no longer has the model to begin with",
                    pointer="/model/job",
                )
            if self._claim.resume_from is not None:
                fetch_checkpoint(
                    self._claim.resume_from, self._folder.work / "checkpoints", self._note
                )
        except TrainingError as error:
            self.error = error
        except Exception as error:  # a store's own kind of error
            logger.exception("preparation failed")
            self.error = TrainingError(
                f"the node could not prepare the run: {error}", reason=Reason.INTERNAL_ERROR
            )
        finally:
            self.done = True
            self._poke()


def fetch_checkpoint(point: ResumePoint, checkpoints: Path, note: Note) -> int | None:
    """Puts the checkpoint, or the newest whole one before it, into ``checkpoints``; its step.

    None when none of them is whole: the run then begins at its first step. Raises what the store
    raises when it cannot be reached, and ``StorageFull``.
    """
    for step, url, manifest in _candidates(point):
        try:
            _download(url, manifest, checkpoints / f"step-{step:08d}")
        except (CheckpointTorn, FileNotFoundError) as error:
            message = f"the checkpoint of step {step} is torn and is passed over: {error}"
            note("checkpoint_torn", message, step=step)
            continue
        message = f"the checkpoint of step {step} was fetched from the store and verified"
        note("checkpoint_fetched", message, step=step)
        return step
    note("no_checkpoint", "no whole checkpoint was found: the run begins at its first step")
    return None


def fetch_model(point: ModelPoint, target: Path) -> None:
    """Puts another job's model into ``target``; of a checkpoint only the model's own files.

    Raises ``ModelUnavailable`` when it is not there or not what was registered, ``StorageFull``,
    and what the store raises when it cannot be reached.
    """
    files = [file for file in point.files if not str(file["path"]).startswith(_TRAINING_STATE)]
    try:
        _download_files(ArtifactStore(point.url), files, target)
    except FileNotFoundError as error:
        raise ModelUnavailable(
            f"the model of job {point.job} does not lie in a store that this node reaches: {error}",
            pointer="/model/job",
        ) from error
    except CheckpointTorn as error:
        raise ModelUnavailable(
            f"the model of job {point.job} is damaged: {error}", pointer="/model/job"
        ) from error


def trainer_order(folder: AttemptFolder, claim: Claim, settings: WorkerSettings) -> dict[str, Any]:
    """The line that tells a spare trainer what to do."""
    # Without a root the trainer would read any path of this machine that a spec names.
    roots = [str(root) for root in settings.storage.roots] or [str(folder.work)]
    visible = ",".join(str(index) for index in claim.gpu_indices) if claim.device == "cuda" else ""
    return {
        "spec_path": str(folder.spec),
        "workdir": str(folder.work),
        "roots": roots,
        "device": claim.device,
        "job_folder": str(folder.model) if claim.model_from is not None else None,
        "env": {"CUDA_VISIBLE_DEVICES": visible},
    }


def _candidates(point: ResumePoint) -> Iterator[tuple[int, str, list[dict[str, Any]] | None]]:
    manifest = point.manifest
    files = manifest.get("files") if isinstance(manifest, dict) else manifest
    yield point.step, point.url, files
    parent = point.url.rstrip("/").rpartition("/")[0]
    steps: set[int] = set()
    for stored in ArtifactStore(parent).list():
        folder, _, name = stored.key.partition("/")
        number = folder.removeprefix("step-")
        if name == "manifest.json" and number.isdigit() and int(number) < point.step:
            steps.add(int(number))
    for step in sorted(steps, reverse=True):
        yield step, f"{parent}/step-{step:08d}", None


def _download(url: str, files: list[dict[str, Any]] | None, target: Path) -> None:
    store = ArtifactStore(url)
    if files is None:
        files = _read_manifest(store)
    if not any(entry["path"] == "manifest.json" for entry in files):
        files = [*files, {"path": "manifest.json"}]
    _download_files(store, files, target)


def _download_files(store: ArtifactStore, files: list[dict[str, Any]], target: Path) -> None:
    """All of them in ``target``, verified, or nothing."""
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for entry in files:
            path = str(entry["path"])
            place = partial / path
            if not place.resolve().is_relative_to(partial.resolve()):
                raise CheckpointTorn(f"its manifest names {path!r}")
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                store.get(path, place, sha256=entry.get("sha256"))
            except ValueError as error:
                raise CheckpointTorn(str(error)) from error
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_manifest(store: ArtifactStore) -> list[dict[str, Any]]:
    try:
        with store.open("manifest.json") as file:
            manifest = json.load(file)
        if manifest["complete"] is not True:
            raise CheckpointTorn("its manifest does not say that it is complete")
        return list(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointTorn(f"its manifest cannot be read: {error}") from error
