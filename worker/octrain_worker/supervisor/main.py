"""The supervisor's process: what it becomes before it has an attempt, and how it gets one.

An idle supervisor holds a spare trainer and waits for one line on its standard input; the agent
writes ``{"attempt_id", "job_id", "attempt"}`` to give it an attempt. When the agent goes away
before that, the pipe closes and the idle supervisor ends. After that line it needs the agent no
more.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from octrain_worker.api_client import ApiClient
from octrain_worker.attempt_folder import AttemptFolder, SupervisorRecord
from octrain_worker.logs import set_attempt
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.closing import ExitStatus
from octrain_worker.supervisor.environment import trainer_environment
from octrain_worker.supervisor.process_tree import become_subreaper, descendants, end_processes
from octrain_worker.supervisor.run import Supervisor
from octrain_worker.supervisor.trainer import Trainer
from octrain_worker.supervisor.wakeup import Wakeup
from octrain_worker.tracing import AttemptTrace, attempt_trace

__all__ = ["Assignment", "supervise", "supervise_when_told"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """Which attempt to supervise."""

    attempt_id: str
    job_id: str
    attempt: int
    # The trace context that came with the message.
    traceparent: str | None = None


def supervise(settings: WorkerSettings, node_id: str, assignment: Assignment) -> ExitStatus:
    """Supervises this attempt from now on: begins it, or closes it if it had begun before."""
    become_subreaper()
    wakeup = Wakeup()
    folder = AttemptFolder.of(settings.attempts_folder, assignment.attempt_id)
    trainer = None
    trace = AttemptTrace()
    marker = str(uuid.uuid4())
    if not folder.started.exists():
        spare = _spare_folder(settings, marker)
        trainer = _start_trainer(settings, spare, marker)
        trace = attempt_trace(settings.tracing)
    return _run(settings, node_id, wakeup, folder, assignment, trainer, marker, trace)


def supervise_when_told(settings: WorkerSettings, node_id: str) -> ExitStatus:
    """Waits, with a spare trainer, for the attempt to supervise."""
    become_subreaper()
    wakeup = Wakeup()
    marker = str(uuid.uuid4())
    spare = _spare_folder(settings, marker)
    trainer = _start_trainer(settings, spare, marker)
    # Imported now, so that no attempt waits for it.
    trace = attempt_trace(settings.tracing)
    assignment = _wait_for_assignment(wakeup, trainer)
    if assignment is None:
        _end_everything(trainer)
        shutil.rmtree(spare, ignore_errors=True)
        return ExitStatus.DONE
    folder = AttemptFolder.of(settings.attempts_folder, assignment.attempt_id)
    return _run(settings, node_id, wakeup, folder, assignment, trainer, marker, trace)


def _run(
    settings: WorkerSettings,
    node_id: str,
    wakeup: Wakeup,
    folder: AttemptFolder,
    assignment: Assignment,
    trainer: Trainer | None,
    marker: str,
    trace: AttemptTrace,
) -> ExitStatus:
    folder.create()
    lock = folder.lock()
    if lock is None or folder.finished.exists() or (trainer and folder.started.exists()):
        # A message delivered twice: the attempt has its supervisor, or had its run.
        logger.info("attempt %s is already looked after", folder.attempt_id)
        if trainer is not None:
            _end_everything(trainer)
            shutil.rmtree(_spare_folder(settings, marker), ignore_errors=True)
        return ExitStatus.NOT_OURS
    if trainer is not None:
        folder.hold_reserve()
    else:
        folder.release_reserve()
    predecessor = folder.read_record()
    record = SupervisorRecord.of_this_process(
        assignment.attempt_id,
        assignment.job_id,
        assignment.attempt,
        nonce=predecessor.nonce if predecessor is not None else str(uuid.uuid4()),
        marker=marker,
    )
    if trainer is not None:
        _adopt_logs(_spare_folder(settings, marker), folder)
    set_attempt(assignment.job_id, assignment.attempt_id)
    trace.taken(
        {
            "job_id": assignment.job_id,
            "attempt_id": assignment.attempt_id,
            "attempt": assignment.attempt,
            "node_id": node_id,
        }
    )
    trace.begin(assignment.traceparent)
    client = ApiClient(
        settings.api.api_url,
        settings.api.node_key.get_secret_value(),
        ca_file=settings.api.ca_file,
    )
    supervisor = Supervisor(
        settings,
        folder,
        client,
        wakeup,
        node_id=node_id,
        record=record,
        predecessor=predecessor,
        trainer=trainer,
        trace=trace,
    )
    folder.write_record(record)
    try:
        return supervisor.run()
    finally:
        client.close()
        trace.close()


def _start_trainer(settings: WorkerSettings, spare: Path, marker: str) -> Trainer:
    return Trainer(
        settings.trainer.command,
        trainer_environment(marker, extra_names=settings.trainer.environment),
        stdout=spare / "stdout.log",
        stderr=spare / "stderr.log",
    )


def _spare_folder(settings: WorkerSettings, marker: str) -> Path:
    """Where a spare prints before it has an attempt; the files then move, open as they are."""
    folder = settings.spares_folder / marker
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _adopt_logs(spare: Path, folder: AttemptFolder) -> None:
    (spare / "stdout.log").replace(folder.stdout)
    (spare / "stderr.log").replace(folder.stderr)
    shutil.rmtree(spare, ignore_errors=True)


def _wait_for_assignment(wakeup: Wakeup, trainer: Trainer) -> Assignment | None:
    data = b""
    descriptor = sys.stdin.fileno()
    while True:
        readable = wakeup.wait(3600.0, descriptor)
        trainer.reap()
        if wakeup.terminations:
            return None
        if readable:
            piece = os.read(descriptor, 65536)
            if not piece:
                return None
            data += piece
            if b"\n" in data:
                return Assignment(**json.loads(data.partition(b"\n")[0]))
        if trainer.status is not None:
            logger.error("the spare trainer ended with %s", trainer.status)
            return None


def _end_everything(trainer: Trainer) -> None:
    me = os.getpid()
    end_processes(lambda: descendants(me), grace=0.0, patience=10.0, reap=trainer.reap)
