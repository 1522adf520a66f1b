"""What must be in place before a trainer begins: its spec, room on the disks, the model of another
job that it begins with, and the checkpoint it goes on from."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fp8core.disk_room import Room, check_room, planned_checkpoints
from fp8core.errors import DataInvalid, ModelUnavailable, StorageFull, TrainingError
from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.api_client import Claim
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.clock import boot_time
from octrain_worker.roots import allowed_roots
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.fetching import (
    fetch_checkpoint,
    fetch_dataset,
    fetch_model,
    model_bytes,
)
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.outcome import Verdict
from octrain_worker.supervisor.secrets import JobSecrets
from octrain_worker.tracing import AttemptTrace

__all__ = ["Preparation", "trainer_order"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 15.0


class Preparation:
    """Runs in a thread of its own, so that cancel and lease are obeyed during a long download.

    ``verdict`` is set, before ``done``, when the attempt cannot begin.
    """

    def __init__(
        self,
        folder: AttemptFolder,
        claim: Claim,
        settings: WorkerSettings,
        link: Link,
        poke: Callable[[], None],
        trace: AttemptTrace,
    ) -> None:
        self.verdict: Verdict | None = None
        self.done = False
        self._folder = folder
        self._claim = claim
        self._settings = settings
        self._link = link
        self._poke = poke
        self._trace = trace
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        began_at = time.time()
        try:
            self.verdict = self._prepare()
        except TrainingError as error:
            self.verdict = _cannot_begin(error.reason, str(error))
        except Exception as error:
            logger.exception("preparation failed")
            self.verdict = _cannot_begin(
                Reason.INTERNAL_ERROR, f"the node could not prepare the run: {error}"
            )
        finally:
            self.done = True
            self._poke()
            self._trace.part("prepare", began_at)

    def _prepare(self) -> Verdict | None:
        claim, folder = self._claim, self._folder
        write_private(folder.spec, claim.spec)
        JobSecrets(claim.spec).check()
        model = claim.spec.get("model") or {}
        if claim.model_from is None and model.get("source") == "job":
            raise ModelUnavailable(
                f"job {model.get('job')} no longer has the model to begin with",
                pointer="/model/job",
            )
        data = claim.spec.get("data") or {}
        if claim.dataset_from is None and data.get("source") == "upload":
            raise DataInvalid(
                f"the data set {data.get('dataset')} is no longer there", pointer="/data/dataset"
            )
        self._check_room()
        return self._patiently(self._fetch)

    def _fetch(self) -> None:
        if self._claim.model_from is not None and not self._folder.model.exists():
            fetch_model(self._claim.model_from, self._folder.model)
        if self._claim.dataset_from is not None and not self._folder.dataset.exists():
            fetch_dataset(self._claim.dataset_from, self._folder.dataset)
        candidates = self._claim.resume_candidates
        if candidates:
            fetch_checkpoint(candidates, self._folder.work / "checkpoints", self._link.note)

    def _patiently(self, fetch: Callable[[], None]) -> Verdict | None:
        """Tries again while the store does not answer. What then still fails may well work on
        another node, or later."""
        give_up_at = boot_time() + self._settings.supervisor.fetch_patience_seconds
        pause = _FIRST_PAUSE
        told = False
        while True:
            try:
                fetch()
                return None
            except TrainingError:
                raise
            except Exception as error:  # every store raises its own
                logger.warning("the store does not give: %s", error)
                if boot_time() + pause > give_up_at:
                    detail = f"the artifact store could not be read: {error}"
                    return _cannot_begin(Reason.INTERNAL_ERROR, detail, resumable=True)
                if not told:
                    told = True
                    message = f"the artifact store cannot be read now, it is tried again: {error}"
                    self._link.note("store_unreachable", message)
            if self._link.closed.wait(pause):
                return None
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _check_room(self) -> None:
        """Compares the disks with what is known of sizes before anything is loaded: those of the
        newest checkpoint, of a model that is fetched. The trainer itself checks a first run, when
        it knows how large its tensors are."""
        claim, work = self._claim, self._folder.work
        if claim.dataset_from is not None:
            needed, free = claim.dataset_from.size, shutil.disk_usage(work).free
            if needed > free:
                raise StorageFull(
                    f"the data set {claim.dataset_from.dataset} has {needed} bytes, and the "
                    f"attempt's folder beside {work} has {free} free"
                )
        if claim.model_from is not None:
            needed, free = model_bytes(claim.model_from.files), shutil.disk_usage(work).free
            if needed > free:
                raise StorageFull(
                    f"the model of job {claim.model_from.job} has {needed} bytes, and the work "
                    f"folder {work} has {free} free"
                )
        if not claim.resume_candidates:
            return
        newest = claim.resume_candidates[0]
        keep = claim.spec.get("checkpoint") or {}
        rooms = [Room("the work folder", work)]
        store = store_room(self._settings, claim)
        keep_best = int(keep.get("keep_best", 0))
        check_room(
            rooms if store is None else [*rooms, store],
            checkpoint=newest.size,
            model=model_bytes(newest.files),
            keep=int(keep.get("keep_last", 1)) + keep_best,
            planned=planned_checkpoints(
                int((claim.spec.get("training") or {}).get("steps", newest.step)),
                save_every=int(keep.get("every_steps", 0)),
                evaluate_every=int((claim.spec.get("evaluation") or {}).get("every_steps", 0)),
                keep_best=keep_best,
            ),
        )


def store_room(settings: WorkerSettings, claim: Claim) -> Room | None:
    """The store as a place on a disk of this machine, with what it holds of the job; None for an
    object store, which says nothing of its room."""
    url = urlsplit(settings.artifact_url)
    if url.scheme != "file":
        return None
    held = sum(point.size for point in claim.resume_candidates)
    return Room("the artifact store", Path(unquote(url.path)), held)


def trainer_order(
    folder: AttemptFolder, claim: Claim, settings: WorkerSettings, traceparent: str | None = None
) -> dict[str, Any]:
    """The line that tells a spare trainer what to do; ``traceparent`` is the node's own span."""
    # Without a root the trainer would read any path of this machine that a spec names.
    roots = allowed_roots(settings.storage.roots, claim.roots) or [str(folder.work)]
    visible = ",".join(str(index) for index in claim.gpu_indices) if claim.device == "cuda" else ""
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    traceparent = traceparent or claim.traceparent
    if traceparent is not None:
        environment["TRACEPARENT"] = traceparent
    store = store_room(settings, claim)
    if store is not None:
        environment["FP8CORE_STORE_FOLDER"] = str(store.folder)
        environment["FP8CORE_STORE_HELD_BYTES"] = str(store.held)
    return {
        "spec_path": str(folder.spec),
        "workdir": str(folder.work),
        "roots": roots,
        "device": claim.device,
        "job_folder": str(folder.model) if claim.model_from is not None else None,
        "upload_folder": str(folder.dataset) if claim.dataset_from is not None else None,
        "env": environment | JobSecrets(claim.spec).environment(),
    }


def _cannot_begin(reason: Reason, detail: str, *, resumable: bool = False) -> Verdict:
    return Verdict(Outcome.FAILED, reason, detail, None, None, resumable=resumable)
