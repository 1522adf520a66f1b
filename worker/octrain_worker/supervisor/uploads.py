"""From the workdir to the artifact store: checkpoints while training goes on, results at the end.

The order makes it safe: files first, the manifest last, then the registration with the API, so
what the API names is complete. A checkpoint is registered when the API has all that was measured
up to it: the next attempt may begin there, and then nobody else tells of the steps before. It is
hard-linked the moment it is announced, so the trainer may prune its own copies meanwhile. When
uploads are slower than checkpoints, only the best and as many of the newest as the spec keeps wait
for their turn.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8core.storage import ArtifactStore, StoredFile
from fp8core.stored_json import read_json
from octrain_worker.api_client import StaleAttempt, retrying
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.supervisor.link import Link

__all__ = ["Upload", "Uploads"]

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 15.0
_LONGEST_NAME = 200
_TOLD_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Upload:
    """One artifact: a file or a folder of the attempt."""

    kind: str
    name: str
    source: Path
    step: int | None = None
    best: bool = False
    metric: float | str | None = None
    # Whether the API has the records up to the one that announced it.
    told: Callable[[], bool] = field(default=lambda: True, compare=False)

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"


class Uploads:
    """A thread that stores and registers one artifact after another."""

    def __init__(
        self, folder: AttemptFolder, link: Link, *, url: str, prefix: str, keep: int
    ) -> None:
        self._folder = folder
        self._link = link
        self._url = url
        self._prefix = prefix.strip("/")
        self._keep = max(1, keep)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        registered = read_json(folder.registered)
        # What is not in it is registered once more, to no effect.
        self._registered = {
            one
            for one in (registered if isinstance(registered, list) else [])
            if isinstance(one, str)
        }
        self._problem: str | None = None
        self._lost_model: str | None = None
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_records(self, records: Iterable[dict[str, Any]], told: Callable[[], bool]) -> None:
        """Takes up the checkpoints and artifacts that telemetry records announce.

        ``told`` answers whether the API has these records.
        """
        for record in records:
            if record["type"] not in ("checkpoint", "artifact"):
                continue
            if record["type"] == "artifact" and record.get("kind") == "checkpoint":
                continue  # its checkpoint record says more
            if record["type"] == "checkpoint":
                self._add_checkpoint(record, told)
                continue
            source = self._inside(str(record.get("path", "")))
            if source is not None:
                kind = str(record.get("kind"))
                self.add(Upload(kind, source.name, source, step=record.get("step")))

    def add(self, upload: Upload) -> None:
        with self._changed:
            if upload.key in self._registered:
                return
            self._waiting = [other for other in self._waiting if other.key != upload.key]
            self._waiting.append(upload)
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._waiting and self._current is None

    @property
    def problem(self) -> str | None:
        """Why something is not stored, or why the model never will be; None when all is well."""
        with self._lock:
            if self._waiting or self._current is not None:
                return self._problem or "the artifact store is too slow"
            return self._lost_model

    def _inside(self, relative: str) -> Path | None:
        """The announced path, if it exists and lies in the workdir."""
        work = self._folder.work.resolve()
        try:
            path = (work / relative).resolve()
            found = path != work and path.is_relative_to(work) and path.exists()
        except (OSError, ValueError):  # no name of a file: of a record that was damaged
            found = False
        if not found:
            logger.warning("announced artifact %r is not in the workdir", relative)
            return None
        return path

    def _add_checkpoint(self, record: dict[str, Any], told: Callable[[], bool]) -> None:
        relative = str(record.get("path", ""))
        name = Path(relative).name
        if name in ("", "..") or f"checkpoint:{name}" in self._registered:
            return
        if not name.isprintable() or len(name) > _LONGEST_NAME:  # of a record that was damaged
            return
        snapshot = self._folder.uploads / name
        # One that is there was linked whole by this supervisor or its predecessor.
        if not snapshot.exists():
            source = self._inside(relative)
            if source is None:
                return
            partial = snapshot.with_name(f".{snapshot.name}")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                shutil.copytree(source, partial, copy_function=os.link)
                partial.replace(snapshot)
            except (OSError, shutil.Error) as error:
                logger.warning("checkpoint %s cannot be linked: %s", source.name, error)
                return
        best, metric = bool(record.get("best")), record.get("metric")
        step = record.get("step")
        self.add(Upload("checkpoint", snapshot.name, snapshot, step, best, metric, told))
        with self._lock:
            plain = [one for one in self._waiting if one.kind == "checkpoint" and not one.best]
            for old in plain[: -self._keep]:
                self._waiting.remove(old)
                shutil.rmtree(old.source, ignore_errors=True)

    def _run(self) -> None:
        while not self._link.closed.is_set():
            with self._changed:
                if not self._waiting:
                    self._changed.wait(0.5)
                    continue
                upload = self._current = self._waiting.pop(0)
            try:
                self._finish_one(upload)
            except StaleAttempt as error:
                self._link.disown(str(error))
            except Exception as error:  # refused, torn, or no room for our own notes of it
                logger.exception("%s %s is given up", upload.kind, upload.name)
                self._link.note(
                    "artifact_lost", f"{upload.kind} {upload.name} is not kept: {error}"
                )
                if upload.kind == "model":
                    self._lost_model = str(error)
            finally:
                with self._lock:
                    self._current = self._problem = None

    def _finish_one(self, upload: Upload) -> None:
        """Stores and registers, trying again for as long as the supervisor lives."""
        pause = 0.5
        files: list[StoredFile] = []
        while not self._link.closed.is_set():
            try:
                files = self._store(upload)
                break
            except _Torn:
                raise
            except Exception as error:  # every store raises its own
                logger.warning("%s %s is not stored yet: %s", upload.kind, upload.name, error)
                with self._lock:
                    first, self._problem = self._problem is None, f"{upload.name}: {error}"
                if first:
                    self._link.note(
                        "artifact_delayed",
                        f"{upload.kind} {upload.name} cannot be stored now: {error}",
                    )
                self._link.closed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        base = self._base(upload)
        body = {
            "kind": upload.kind,
            "name": upload.name,
            "step": upload.step,
            "best": upload.best,
            "metric": upload.metric,
            "url": f"{self._url.rstrip('/')}/{base}",
            "files": [
                {
                    "path": file.key.removeprefix(base + "/"),
                    "size": file.size,
                    "sha256": file.sha256,
                }
                for file in files
            ],
        }
        link = self._link
        while not upload.told():
            if link.closed.wait(_TOLD_POLL_SECONDS):
                return
        done = retrying(
            lambda: link.client.artifact(link.attempt_id, link.token, body), stop=link.closed
        )
        if done is None:
            return
        with self._lock:
            self._registered.add(upload.key)
            registered = sorted(self._registered)
        try:
            write_private(self._folder.registered, registered)
        except OSError as error:  # a successor registers it once more, to no effect
            logger.warning("what is registered cannot be written down: %s", error)
        if upload.source.is_relative_to(self._folder.uploads):
            shutil.rmtree(upload.source, ignore_errors=True)

    def _base(self, upload: Upload) -> str:
        """The folder in the store that the artifact's paths are relative to."""
        if upload.kind == "checkpoint":
            return f"{self._prefix}/checkpoints/{upload.name}"
        if upload.kind == "log":
            return f"{self._prefix}/logs"
        return f"{self._prefix}/{upload.name}" if upload.source.is_dir() else self._prefix

    def _store(self, upload: Upload) -> list[StoredFile]:
        store = ArtifactStore(self._url)
        base = self._base(upload)
        if upload.source.is_file():
            return [store.put_file(upload.source, f"{base}/{upload.source.name}")]
        manifest = upload.source / "manifest.json"
        paths = sorted(path for path in upload.source.rglob("*") if not path.is_dir())
        for path in paths:
            if path.is_symlink() or not path.is_file():
                raise _Torn(f"{path.name} is not a regular file: a link could lead anywhere")
        files = [
            store.put_file(path, f"{base}/{path.relative_to(upload.source).as_posix()}")
            for path in paths
            if path != manifest
        ]
        if manifest.is_file():
            _verify(manifest, base, files)
            files.append(store.put_file(manifest, f"{base}/{manifest.name}"))
        else:
            _put_manifest(store, base, files)
        return files


class _Torn(Exception):
    """What the trainer wrote is not fit to be kept: copying it again cannot help."""


def _verify(manifest: Path, base: str, files: list[StoredFile]) -> None:
    try:
        wanted = {
            str(entry["path"]): str(entry["sha256"])
            for entry in json.loads(manifest.read_bytes())["files"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Torn(f"manifest.json cannot be read: {error}") from error
    stored = {file.key.removeprefix(base + "/"): file.sha256 for file in files}
    for path, digest in wanted.items():
        if stored.get(path) != digest:
            raise _Torn(f"{path} is not the file that manifest.json names")


def _put_manifest(store: ArtifactStore, base: str, files: list[StoredFile]) -> None:
    """The manifest of a folder that brings none of its own, beside the folder and last of all."""
    entries = [
        {"path": file.key.removeprefix(base + "/"), "size": file.size, "sha256": file.sha256}
        for file in files
    ]
    data = json.dumps({"complete": True, "files": entries}, indent=2).encode()
    store.put_bytes(data, f"{base}.manifest.json")
