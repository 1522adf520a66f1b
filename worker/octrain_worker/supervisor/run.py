"""One attempt, from claim to finish.

The main thread decides and acts; heartbeats, shipping, uploads and the download of a checkpoint are
threads that only talk to the network and the store. Nothing here begins a trainer twice: once
``started.json`` stands, this or any later supervisor of the folder only closes the attempt.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.api_client import (
    ApiClient,
    ApiRefused,
    Claim,
    StaleAttempt,
    retrying,
)
from octrain_worker.attempt_folder import (
    AttemptFolder,
    SupervisorRecord,
    read_json,
    write_private,
)
from octrain_worker.clock import boot_time
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.closing import Closing, ExitStatus, disowned
from octrain_worker.supervisor.collector import Collector, last_lines
from octrain_worker.supervisor.environment import MARKER
from octrain_worker.supervisor.host_memory import OomCounts
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.outcome import Ending, StopCause, Verdict, classify
from octrain_worker.supervisor.preparation import Preparation, trainer_order
from octrain_worker.supervisor.process_tree import descendants, end_processes, with_environment
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Spool
from octrain_worker.supervisor.trainer import Trainer
from octrain_worker.supervisor.uploads import Uploads
from octrain_worker.supervisor.wakeup import Wakeup

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_LOG_TAIL_LINES = 50
_DRAIN_SECONDS = 30.0


class Supervisor:
    """Runs, or closes, the attempt of one folder."""

    def __init__(
        self,
        settings: WorkerSettings,
        folder: AttemptFolder,
        client: ApiClient,
        wakeup: Wakeup,
        *,
        node_id: str,
        record: SupervisorRecord,
        predecessor: SupervisorRecord | None,
        trainer: Trainer | None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._client = client
        self._wakeup = wakeup
        self._node_id = node_id
        self._record = record
        self._predecessor = predecessor
        self._trainer = trainer
        self._cause: StopCause | None = None
        self._deadline = math.inf
        self._killed = False
        self._step: int | None = None
        self._disk_full = False

    def run(self) -> ExitStatus:
        lease = Lease()
        if self._predecessor is not None:
            self._end_leftovers(self._predecessor)
        claim = self._claim(lease)
        if claim is None:
            return self._give_up()
        self._link = Link(
            self._client,
            self._folder,
            claim.fencing_token,
            lease=lease,
            wanted=claim.wanted,
            interval=claim.heartbeat_interval_seconds,
            poke=self._wakeup.poke,
        )
        self._spool = Spool(self._folder.spool)
        self._collector = Collector(
            self._spool,
            telemetry=self._folder.work / "telemetry.jsonl",
            logs={"stdout": self._folder.stdout, "stderr": self._folder.stderr},
        )
        self._shipper = Shipper(self._spool, self._link)
        self._uploads = Uploads(
            self._folder,
            self._link,
            url=self._settings.artifact_url,
            prefix=claim.artifact_prefix,
            keep=int((claim.spec.get("checkpoint") or {}).get("keep_last", 3)),
        )
        self._link.start()
        self._shipper.start()
        self._uploads.start()
        try:
            if self._trainer is None:
                verdict = self._verdict_on_predecessor()
            else:
                verdict = self._train(claim, self._trainer)
            if verdict is None:
                return self._disowned()
            closing = Closing(
                self._settings.supervisor,
                self._folder,
                self._link,
                self._spool,
                self._shipper,
                self._uploads,
                self._wakeup,
            )
            return closing.close(verdict)
        finally:
            self._link.close()
            self._spool.close()

    # --- claim -----------------------------------------------------------------------------

    def _claim(self, lease: Lease) -> Claim | None:
        """The attempt, if it is ours. A successor claims again with the same nonce, and so gets
        the token that its predecessor may not have lived to write down."""
        give_up_at = boot_time() + self._settings.supervisor.claim_patience_seconds
        stop = threading.Event()

        def ask() -> tuple[float, Claim]:
            sent_at = boot_time()
            answer = self._client.claim(
                self._folder.attempt_id, node_id=self._node_id, supervisor=self._record.nonce
            )
            return sent_at, answer

        def failed(error: Exception, _pause: float) -> None:
            logger.warning("claim: %s", error)
            if boot_time() > give_up_at or self._wakeup.terminations:
                stop.set()

        self._disowned_at_claim = False
        try:
            answer = retrying(ask, stop=stop, on_failure=failed, longest_delay=2.0)
        except StaleAttempt as error:
            logger.info("attempt %s is not ours: %s", self._folder.attempt_id, error)
            self._disowned_at_claim = True
            return None
        except ApiRefused as error:
            logger.error("claim refused: %s", error)
            return None
        if answer is None:
            return None
        sent_at, claim = answer
        lease.grant(sent_at, claim.lease_seconds)
        write_private(self._folder.claim, claim.model_dump(mode="json"))
        return claim

    def _give_up(self) -> ExitStatus:
        """No claim. An attempt that never began here leaves nothing; one that did stays for a
        successor, unless the API disowned it."""
        self._end_all(grace=0.0)
        if not self._folder.started.exists():
            self._folder.remove()
            return ExitStatus.NOT_OURS
        if self._disowned_at_claim:
            return disowned(self._folder)
        return ExitStatus.LEFT_FOR_SUCCESSOR

    # --- training --------------------------------------------------------------------------

    def _train(self, claim: Claim, trainer: Trainer) -> Verdict | None:
        """Watches the trainer to its end; None when the attempt was disowned."""
        preparation = Preparation(self._folder, claim, self._link.note, self._wakeup.poke)
        preparation.start()
        memory = OomCounts.now()
        limits = claim.spec.get("limits") or {}
        cancel_deadline = float(limits.get("cancel_deadline_seconds", 120))
        while True:
            self._wakeup.wait(_TICK_SECONDS)
            trainer.reap()
            self._round()
            if self._link.stale is not None:
                self._end_all(grace=0.0)
                return None
            if preparation.error is not None:
                self._end_all(grace=0.0)
                return _verdict_on_preparation(preparation)
            if trainer.status is None:
                self._decide(trainer, cancel_deadline)
            if trainer.status is not None:
                break
            if preparation.done and not trainer.begun and self._cause is None:
                self._begin(trainer, claim)
        self._end_all(grace=self._settings.supervisor.leftover_grace_seconds)
        self._link.end_of_training()
        self._folder.release_reserve()
        self._drain()
        if self._link.stale is not None:
            return None
        return classify(
            Ending(
                result=read_json(self._folder.work / "result.json"),
                status=trainer.status,
                cause=self._cause,
                killed=self._killed,
                host_out_of_memory=OomCounts.now().grew_since(memory),
                step=self._step,
                log_tail=self._log_tail(),
            )
        )

    def _begin(self, trainer: Trainer, claim: Claim) -> None:
        write_private(self._folder.started, {"time": time.time()})
        trainer.begin(trainer_order(self._folder, claim, self._settings))
        logger.info("trainer %d began attempt %s", trainer.pid, self._folder.attempt_id)

    def _decide(self, trainer: Trainer, cancel_deadline: float) -> None:
        """Stops the trainer when somebody wants it stopped, and kills it when it does not."""
        now = boot_time()
        wanted = self._wanted_stop()
        if wanted is not None and wanted is not self._cause:
            patience = {
                StopCause.CANCEL: cancel_deadline,
                StopCause.PAUSE: cancel_deadline,
                StopCause.SHUTDOWN: self._settings.supervisor.shutdown_grace_seconds,
                StopCause.LEASE: math.inf,  # the lease itself is the deadline
            }[wanted]
            first = self._cause is None
            self._cause = wanted
            self._deadline = min(self._deadline, now + patience)
            logger.info("stopping the trainer: %s", wanted)
            if first:
                if trainer.begun:
                    trainer.send(signal.SIGTERM)
                else:
                    trainer.send(signal.SIGKILL)
        over = now >= self._deadline or self._wakeup.terminations > 1
        fenced = now >= self._link.lease.kill_at
        if (over or fenced) and trainer.status is None:
            self._killed = trainer.begun
            grace = 0.0 if fenced else self._settings.supervisor.leftover_grace_seconds
            self._cause = self._cause or StopCause.LEASE
            self._end_all(grace=grace if self._wakeup.terminations <= 1 else 0.0)

    def _wanted_stop(self) -> StopCause | None:
        """The weightiest reason to stop now; one given before is only replaced by a cancel."""
        if self._link.wanted == "cancel":
            return StopCause.CANCEL
        if self._cause is not None and self._cause is not StopCause.PAUSE:
            return None
        if self._wakeup.terminations:
            return StopCause.SHUTDOWN
        if self._cause is not None:
            return None
        if self._link.wanted == "pause":
            return StopCause.PAUSE
        if self._link.lease.stopping:
            return StopCause.LEASE
        return None

    # --- a predecessor's attempt -----------------------------------------------------------

    def _verdict_on_predecessor(self) -> Verdict | None:
        """The supervisor that ran this attempt is gone: what it left is collected and judged."""
        self._link.end_of_training()
        self._link.note(
            "supervisor_lost", "the attempt's supervisor died; the node closes the attempt"
        )
        records = _read_records(self._folder.work / "telemetry.jsonl")
        self._uploads.add_records(records)
        for record in records:
            self._note_progress(record)
        self._drain()
        earlier = read_json(self._folder.outcome)
        if earlier is not None:
            return Verdict(
                outcome=Outcome(earlier["outcome"]),
                reason=Reason(earlier["reason"]),
                detail=earlier["detail"],
                step=earlier["step"],
                exit_code=earlier["exit_code"],
                resumable=earlier["resumable"],
            )
        return classify(
            Ending(
                result=read_json(self._folder.work / "result.json"), status=None, step=self._step
            )
        )

    def _end_leftovers(self, predecessor: SupervisorRecord) -> None:
        """Processes of a dead supervisor's trainer are found by what their environment says."""
        ended = end_processes(
            lambda: with_environment(MARKER, predecessor.marker), grace=0.0, patience=60.0
        )
        if not ended:
            logger.error("processes of attempt %s cannot be killed", self._folder.attempt_id)

    # --- small parts -----------------------------------------------------------------------

    def _disowned(self) -> ExitStatus:
        self._end_all(grace=0.0)
        self._link.end_of_training()
        return disowned(self._folder)

    def _round(self) -> None:
        """Takes up what the trainer wrote and what the threads noted."""
        try:
            records = self._collector.collect()
            self._disk_full = False
        except OSError as error:
            if not self._disk_full:
                logger.error("the spool cannot be written, training goes on: %s", error)
            self._disk_full = True
            return
        self._take(records)
        self._spool_notes()

    def _drain(self) -> None:
        """Takes up the rest. What is shipped meanwhile makes room for it on a full disk; when that
        does not help the rest is given up, for the end of the attempt matters more."""
        give_up_at = boot_time() + _DRAIN_SECONDS
        while True:
            try:
                self._take(self._collector.drain())
                self._spool_notes()
                return
            except OSError as error:
                logger.error("the spool cannot be written: %s", error)
                if self._wakeup.terminations > 1 or boot_time() > give_up_at:
                    return
                self._wakeup.wait(1.0)

    def _take(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self._note_progress(record)
        self._uploads.add_records(records)
        self._shipper.wake()

    def _note_progress(self, record: dict[str, Any]) -> None:
        if record["type"] == "phase":
            self._link.phase = record.get("phase")
        elif record["type"] in ("progress", "metrics") and isinstance(record.get("step"), int):
            self._step = self._link.step = record["step"]

    def _spool_notes(self) -> None:
        if self._link.spool_notes(self._spool):
            self._shipper.wake()

    def _end_all(self, *, grace: float) -> None:
        """Returns when no descendant of this process lives, however long that takes."""
        trainer = self._trainer

        def reap() -> None:
            if trainer is not None:
                trainer.reap()

        me = os.getpid()
        end_processes(lambda: descendants(me), grace=grace, patience=math.inf, reap=reap)
        reap()

    def _log_tail(self) -> str:
        return last_lines([self._folder.stdout, self._folder.stderr], _LOG_TAIL_LINES)


def _verdict_on_preparation(preparation: Preparation) -> Verdict:
    error = preparation.error
    assert error is not None
    return Verdict(Outcome.FAILED, error.reason, str(error), None, None, resumable=False)


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a telemetry file; lines that are none are passed over."""
    records = []
    try:
        data = path.read_bytes()
    except OSError:
        return []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("type"), str):
            records.append(record)
    return records
