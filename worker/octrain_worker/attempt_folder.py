"""The folder of one attempt on this node: the seam between agent, supervisor and its successor.

Whatever a supervisor must not forget when it dies is a small file here, written whole before it is
relied upon. From these files the agent tells living supervisors from dead ones after any restart,
and a successor closes an attempt whose supervisor is gone.

=================== ============================================================================
``supervisor.json`` who supervises: process id, start time, boot, nonce; the job and attempt
``supervisor.lock`` held by the supervisor as long as it lives: never two of them
``claim.json``      the API's answer to the claim, fencing token included (0600)
``reserve``         room for what must still be written when the trainer has filled the disk
``started.json``    the trainer was told to begin; from here on the attempt is never begun again
``lease.json``      until when, on the boot clock, the trainer may run
``shutdown.json``   the node was shut down in order while this attempt ran
``spool/``          records on their way to the API
``damaged/``        files of the spool that the disk has damaged, for a person
``stdout.log`` ...  what the trainer printed
``uploads/``        hard links to checkpoints on their way to the artifact store
``dataset/``        the uploaded data set that it reads
``model/``          another job's model that this one begins with
``work/``           the trainer's workdir
``registered.json`` artifacts that the API has
``outcome.json``    how it ended, before the API knows
``finished.json``   the API knows (or disowned the attempt): nothing is left to do
=================== ============================================================================
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fp8core.stored_json import read_object
from octrain_worker.clock import boot_id
from octrain_worker.supervisor.process_tree import is_alive, read_process

__all__ = ["AttemptFolder", "SupervisorRecord", "is_attempt_id", "write_private"]

_RESERVE_BYTES = 1 << 20
_ID = re.compile(r"att_[0-9a-z_]{1,64}")


@dataclass(frozen=True)
class SupervisorRecord:
    """Which process supervises which attempt.

    ``nonce`` is what it claims with: a successor uses the same, for to the API it is the same
    supervisor. ``marker`` is in the environment of every process of its trainer.
    """

    attempt_id: str
    job_id: str
    attempt: int
    nonce: str
    marker: str
    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of_this_process(
        cls, attempt_id: str, job_id: str, attempt: int, *, nonce: str, marker: str
    ) -> SupervisorRecord:
        process = read_process(os.getpid())
        assert process is not None
        return cls(
            attempt_id=attempt_id,
            job_id=job_id,
            attempt=attempt,
            nonce=nonce,
            marker=marker,
            pid=process.pid,
            start_ticks=process.start_ticks,
            boot=boot_id(),
        )

    @property
    def plausible(self) -> bool:
        """Whether its values are what such values can be."""
        numbers = (self.attempt, self.pid, self.start_ticks)
        words = (self.attempt_id, self.job_id, self.nonce, self.marker, self.boot)
        return all(type(number) is int and number >= 0 for number in numbers) and all(
            isinstance(word, str) and word != "" and word.isprintable() for word in words
        )

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and is_alive(self.pid, self.start_ticks)


class AttemptFolder:
    """Paths and small files of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim = path / "claim.json"
        self.started = path / "started.json"
        self.lease = path / "lease.json"
        self.shutdown = path / "shutdown.json"
        self.outcome = path / "outcome.json"
        self.registered = path / "registered.json"
        self.finished = path / "finished.json"
        self.spec = path / "spec.json"
        self.spool = path / "spool"
        self.damaged = path / "damaged"
        self.stdout = path / "stdout.log"
        self.stderr = path / "stderr.log"
        self.uploads = path / "uploads"
        self.reserve = path / "reserve"
        self.model = path / "model"
        self.dataset = path / "dataset"
        self.work = path / "work"
        self._record = path / "supervisor.json"
        self._lock = path / "supervisor.lock"

    @classmethod
    def of(cls, attempts: Path, attempt_id: str) -> AttemptFolder:
        """The folder of this attempt among those of all.

        Raises ``ValueError`` for what is no attempt's id: it would lead to another place.
        """
        if not is_attempt_id(attempt_id):
            raise ValueError(f"{attempt_id!r} is not the id of an attempt")
        return cls(attempts / attempt_id)

    @classmethod
    def all_in(cls, attempts: Path) -> Iterator[AttemptFolder]:
        """Those that are there. Whatever else lies beside them is nobody's here: left alone."""
        for path in sorted(attempts.iterdir()):
            if is_attempt_id(path.name) and path.is_dir() and not path.is_symlink():
                yield cls(path)

    @property
    def attempt_id(self) -> str:
        return self.path.name

    def create(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)

    def hold_reserve(self) -> None:
        """Takes room on the disk before the trainer does. Without room for it there is none."""
        try:
            with self.reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        except OSError:
            self.release_reserve()

    def release_reserve(self) -> None:
        """The trainer is gone: outcome and spool may use the room."""
        self.reserve.unlink(missing_ok=True)

    def lock(self) -> int | None:
        """Becomes the one supervisor of this folder; None when another lives. The descriptor must
        stay open; the kernel lets go of the lock when the process ends, however it ends."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def write_record(self, record: SupervisorRecord) -> None:
        write_private(self._record, asdict(record))

    def read_record(self) -> SupervisorRecord | None:
        """None where there is none, or what there is cannot be one of any version."""
        value = read_object(self._record) or {}
        names = {field.name for field in fields(SupervisorRecord)}
        if not names <= value.keys():
            return None
        found = SupervisorRecord(**{name: value[name] for name in names})
        return found if found.plausible and found.attempt_id == self.attempt_id else None

    def finish(self, how: str) -> None:
        """Nothing is left to do. ``how``: reported or disowned. Gives the disk space back;
        the small files stay to be looked at until pruned."""
        value = {"how": how, "time": time.time()}
        try:
            write_private(self.finished, value)
        except OSError:  # the disk is full of what goes now
            self.remove_bulk()
            write_private(self.finished, value)
        self.remove_bulk()

    def remove_bulk(self) -> None:
        """Removes what is large."""
        self.release_reserve()
        for folder in (self.work, self.model, self.dataset, self.uploads, self.spool):
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def is_attempt_id(value: object) -> bool:
    """Whether this is written as the API writes ids of attempts: a plain name of a folder."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def write_private(target: Path, value: Any) -> None:
    """Writes JSON that only this user may read, as a whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
