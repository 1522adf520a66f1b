"""The supervisors of this node: started, adopted, watched, succeeded, stopped.

A supervisor outlives the agent, so the truth about it is its attempt's folder, not a child process.
After a restart the agent finds the living ones there and starts a successor for each dead one whose
attempt is still open. One idle supervisor with a spare trainer is kept ready.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import IO

from fp8core.stored_json import read_object
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.clock import boot_id, boot_time
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.closing import ExitStatus
from octrain_worker.supervisor.environment import MARKER
from octrain_worker.supervisor.main import Assignment
from octrain_worker.supervisor.process_tree import (
    Process,
    end_processes,
    read_process,
    send_signal,
    with_environment,
)

__all__ = ["Handle", "Supervisors"]

logger = logging.getLogger(__name__)

_SUCCESSOR_DELAYS = (0.0, 2.0, 10.0, 30.0, 60.0)
# So many successors of one attempt may crash in a row. Each renews the lease when it claims, which
# would otherwise keep the attempt for ever.
_MOST_CRASHES = 10
_OVERDUE_SECONDS = 1.0
# In which an idle supervisor ends its spare trainer and itself.
_IDLE_SECONDS = 3.0
_KEEP_FINISHED_SECONDS = 7 * 86400.0
_KEEP_LOG_BYTES = 16 << 20


@dataclass
class Handle:
    """One supervisor at work. ``ended`` is set when it is gone; ``waited_for`` is held by the one
    message that waits for that."""

    assignment: Assignment
    process: Process
    child: subprocess.Popen[bytes] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    waited_for: threading.Lock = field(default_factory=threading.Lock)

    @property
    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        now = read_process(self.process.pid)
        return now is not None and not now.dead and now.start_ticks == self.process.start_ticks


class Supervisors:
    """All supervisors of one data folder. Safe to call from several threads."""

    def __init__(self, settings: WorkerSettings, node_id: str, *, slots: int) -> None:
        self._settings = settings
        self._node_id = node_id
        self._slots = slots
        self._lock = threading.RLock()
        self._handles: dict[str, Handle] = {}
        self._successors: dict[str, tuple[int, float]] = {}
        self._crashes: dict[str, int] = {}
        self._idle: subprocess.Popen[bytes] | None = None
        self._idle_not_before = 0.0
        self._keep_idle = settings.node.spare_trainer
        self._shutting_down = False
        settings.attempts_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(settings.spares_folder, ignore_errors=True)

    def active(self) -> list[str]:
        """Attempts that have a living supervisor here, or are about to get a successor."""
        with self._lock:
            return sorted({*self._handles, *self._successors})

    def start(self, assignment: Assignment) -> Handle | None:
        """Has this attempt supervised; None when it has had its run here, or when the node shuts
        down. Asking again for one that is supervised answers with the supervisor it has.

        Raises ``ValueError`` for what is no attempt's id.
        """
        with self._lock:
            handle = self._handles.get(assignment.attempt_id)
            if handle is not None and handle.alive:
                return handle
            if self._shutting_down:
                # It would outlive the node's worker, and nobody would have told it to save.
                return None
            folder = self._folder(assignment.attempt_id)
            if folder.finished.exists():
                return None
            adopted = self._adopt(folder)
            if adopted is not None:
                return adopted
            if folder.started.exists():
                return self._start_successor(assignment)
            child = self._take_idle()
            if not _tell(child, assignment):
                child = self._spawn_idle()
                _tell(child, assignment)
            return self._register(assignment, child)

    def adopt_all(self) -> None:
        """Takes up what an earlier agent of this data folder left: to be called once, at start."""
        with self._lock:
            for folder in AttemptFolder.all_in(self._settings.attempts_folder):
                if folder.finished.exists():
                    continue
                record = folder.read_record()
                if record is None:
                    self._remove_unless_locked(folder)
                elif self._adopt(folder) is None:
                    self._successors[folder.attempt_id] = (0, 0.0)

    def remove_finished(self) -> None:
        """Removes what attempts that are closed have left: the folder of one that was closed a week
        ago, of others what is large and went not, for their supervisors were killed over it."""
        for folder in AttemptFolder.all_in(self._settings.attempts_folder):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.finished.stat().st_mtime > _KEEP_FINISHED_SECONDS:
                    folder.remove()
                elif folder.attempt_id not in self.active():
                    folder.remove_bulk()

    def tick(self) -> None:
        """One look at everything; to be called a few times a second."""
        with self._lock:
            for attempt_id, handle in list(self._handles.items()):
                if handle.alive:
                    self._end_overdue(attempt_id, handle)
                else:
                    self._after_end(attempt_id, handle)
            now = time.monotonic()
            for attempt_id, (_, not_before) in list(self._successors.items()):
                if now >= not_before and attempt_id not in self._handles:
                    self._succeed(attempt_id)
            self._look_after_idle(now)

    def keep_spare(self, wanted: bool) -> None:
        """Whether jobs may come: a node that drains keeps no spare, one that drains no more does
        again, unless its settings or its shutdown say otherwise."""
        with self._lock:
            self._keep_idle = (
                wanted and self._settings.node.spare_trainer and not self._shutting_down
            )
            if not self._keep_idle:
                self._drop_idle()

    def shut_down(self, seconds: float, hurry: threading.Event) -> None:
        """Asks every supervisor to save, stop and report, and returns when none lives.

        After ``seconds``, or when ``hurry`` is set, they are told to leave at once; what they could
        not report waits in their folders for the next start of this node.
        """
        with self._lock:
            self._shutting_down = True
            self.keep_spare(False)
            handles = list(self._handles.values())
        for handle in handles:
            self._note_shutdown(handle)
            send_signal(handle.process, signal.SIGTERM)
        _wait_for(handles, seconds, hurry)
        for handle in handles:
            if handle.alive:
                send_signal(handle.process, signal.SIGTERM)
        _wait_for(handles, 1.5, None)
        for handle in handles:
            if handle.alive:
                logger.error("supervisor %d is killed", handle.process.pid)
                self._kill(handle)
        _wait_for(handles, 1.0, None)
        with self._lock:
            for handle in handles:
                handle.ended.set()

    def _note_shutdown(self, handle: Handle) -> None:
        """For a successor: a supervisor that does not survive this was ended by us, not lost."""
        folder = self._folder(handle.assignment.attempt_id)
        try:
            write_private(folder.shutdown, {"time": time.time()})
        except OSError as error:
            logger.warning("the shutdown cannot be written down: %s", error)

    def _register(self, assignment: Assignment, child: subprocess.Popen[bytes]) -> Handle:
        process = read_process(child.pid)
        assert process is not None  # our own child cannot vanish before it is waited for
        handle = Handle(assignment, process, child)
        self._handles[assignment.attempt_id] = handle
        return handle

    def _adopt(self, folder: AttemptFolder) -> Handle | None:
        record = folder.read_record()
        if record is None or not record.alive:
            return None
        process = read_process(record.pid)
        if process is None:
            return None
        logger.info("attempt %s is supervised by process %d", record.attempt_id, record.pid)
        assignment = Assignment(record.attempt_id, record.job_id, record.attempt)
        handle = Handle(assignment, process)
        self._handles[record.attempt_id] = handle
        return handle

    def _after_end(self, attempt_id: str, handle: Handle) -> None:
        del self._handles[attempt_id]
        handle.ended.set()
        folder = self._folder(attempt_id)
        if folder.finished.exists() or folder.read_record() is None:
            self._forget(attempt_id)
            return
        # Of one that was adopted nobody knows how it ended.
        left = handle.child is not None and handle.child.poll() == ExitStatus.LEFT_FOR_SUCCESSOR
        crashes = self._crashes[attempt_id] = 0 if left else self._crashes.get(attempt_id, 0) + 1
        if crashes > _MOST_CRASHES:
            logger.error(
                "attempt %s is given up after %d supervisors that crashed; its lease will end it",
                attempt_id,
                crashes,
            )
            self._forget(attempt_id)
            return
        tries = self._successors.get(attempt_id, (0, 0.0))[0]
        delay = _SUCCESSOR_DELAYS[min(tries, len(_SUCCESSOR_DELAYS) - 1)]
        self._successors[attempt_id] = (tries, time.monotonic() + delay)
        logger.warning("the supervisor of attempt %s is gone, the attempt is open", attempt_id)

    def _forget(self, attempt_id: str) -> None:
        """No successor is started for this attempt."""
        self._successors.pop(attempt_id, None)
        self._crashes.pop(attempt_id, None)

    def _succeed(self, attempt_id: str) -> None:
        tries, _ = self._successors[attempt_id]
        folder = self._folder(attempt_id)
        record = folder.read_record()
        if record is None or folder.finished.exists():
            self._forget(attempt_id)
            return
        self._successors[attempt_id] = (tries + 1, 0.0)
        self._start_successor(Assignment(attempt_id, record.job_id, record.attempt))

    def _start_successor(self, assignment: Assignment) -> Handle:
        folder = self._folder(assignment.attempt_id)
        # The dead supervisor's: its trainer died with it, and the successor starts none.
        folder.lease.unlink(missing_ok=True)
        command = [
            *("--attempt", assignment.attempt_id),
            *("--job", assignment.job_id),
            *("--number", str(assignment.attempt)),
        ]
        child = self._spawn(command, stdin=subprocess.DEVNULL)
        return self._register(assignment, child)

    def _end_overdue(self, attempt_id: str, handle: Handle) -> None:
        """A supervisor that is frozen cannot stop its trainer at the lease's end: this does."""
        folder = self._folder(attempt_id)
        lease = read_object(folder.lease)
        if lease is None or lease.get("boot") != boot_id():
            return
        ends_at = lease.get("ends_at")
        if not isinstance(ends_at, int | float):
            return
        if boot_time() > ends_at + _OVERDUE_SECONDS:
            logger.error("attempt %s runs beyond its lease: its supervisor is killed", attempt_id)
            self._kill(handle)

    def _kill(self, handle: Handle) -> None:
        send_signal(handle.process, signal.SIGKILL)
        folder = self._folder(handle.assignment.attempt_id)
        record = folder.read_record()
        if record is not None:
            end_processes(lambda: with_environment(MARKER, record.marker), grace=0.0, patience=5.0)

    def _look_after_idle(self, now: float) -> None:
        if self._idle is not None and self._idle.poll() is not None:
            logger.error("the idle supervisor ended with %s", self._idle.returncode)
            self._idle = None
            self._idle_not_before = now + 30.0
        wanted = self._keep_idle and len(self._handles) < self._slots
        if wanted and self._idle is None and now >= self._idle_not_before:
            self._idle = self._spawn_idle()

    def _take_idle(self) -> subprocess.Popen[bytes]:
        child, self._idle = self._idle, None
        self._idle_not_before = time.monotonic() + self._settings.node.spare_delay_seconds
        return child if child is not None else self._spawn_idle()

    def _drop_idle(self) -> None:
        child, self._idle = self._idle, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(_IDLE_SECONDS)
        except subprocess.TimeoutExpired:
            # Whoever waits holds up the node's heartbeats and its shutdown. Its trainer dies too.
            logger.error("the idle supervisor %d does not end, it is killed", child.pid)
            child.kill()
            child.wait()

    def _spawn_idle(self) -> subprocess.Popen[bytes]:
        return self._spawn(["--idle"], stdin=subprocess.PIPE)

    def _spawn(self, arguments: list[str], *, stdin: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "octrain_worker", "supervise", "--node-id", self._node_id]
        with self._log() as log:
            return subprocess.Popen(
                [*command, *arguments],
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=self._settings.environment(),
                start_new_session=True,
            )

    def _folder(self, attempt_id: str) -> AttemptFolder:
        return AttemptFolder.of(self._settings.attempts_folder, attempt_id)

    def _log(self) -> IO[bytes]:
        path = self._settings.node.data_dir / "supervisors.log"
        if path.exists() and path.stat().st_size > _KEEP_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab")

    def _remove_unless_locked(self, folder: AttemptFolder) -> None:
        descriptor = folder.lock()
        if descriptor is not None:
            folder.remove()
            os.close(descriptor)


def _tell(child: subprocess.Popen[bytes], assignment: Assignment) -> bool:
    """Gives an idle supervisor its attempt; whether it was there to take it."""
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(asdict(assignment)).encode() + b"\n")
        child.stdin.close()
    except BrokenPipeError:
        return False
    return child.poll() is None


def _wait_for(handles: list[Handle], seconds: float, hurry: threading.Event | None) -> None:
    end = time.monotonic() + seconds
    while any(handle.alive for handle in handles) and time.monotonic() < end:
        if hurry is not None and hurry.wait(0.05):
            return
        if hurry is None:
            time.sleep(0.05)
