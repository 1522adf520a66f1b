"""One attempt, from claim to finish.

The main thread decides and acts; heartbeats, shipping, uploads and the download of a checkpoint are
threads that only talk to the network and the store. Nothing here begins a trainer twice: once
``started.json`` stands, this or any later supervisor of the folder only closes the attempt.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time

from fp8core.stored_json import read_object
from octrain_worker.api_client import ApiClient, Claim
from octrain_worker.attempt_folder import (
    AttemptFolder,
    SupervisorRecord,
    write_private,
)
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.claiming import Claimed, claim_attempt
from octrain_worker.supervisor.closing import Closing, ExitStatus, disowned
from octrain_worker.supervisor.collector import Collector, last_lines
from octrain_worker.supervisor.device_metrics import DeviceMetrics
from octrain_worker.supervisor.environment import MARKER
from octrain_worker.supervisor.gpu_memory import GpuMemory
from octrain_worker.supervisor.host_memory import OomCounts
from octrain_worker.supervisor.intake import Intake
from octrain_worker.supervisor.lease import Lease
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.log_files import bound_logs
from octrain_worker.supervisor.outcome import Ending, StopCause, Verdict, classify
from octrain_worker.supervisor.preparation import Preparation, trainer_order
from octrain_worker.supervisor.process_tree import descendants, end_processes, with_environment
from octrain_worker.supervisor.secrets import JobSecrets
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Spool
from octrain_worker.supervisor.stopping import Stopping, StopStep
from octrain_worker.supervisor.telemetry_file import SINKS, TelemetryFile
from octrain_worker.supervisor.trainer import Trainer
from octrain_worker.supervisor.uploads import Uploads
from octrain_worker.supervisor.wakeup import Wakeup
from octrain_worker.tracing import AttemptTrace

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_LOG_TAIL_LINES = 50
# How long a driver may take to give a GPU's memory back once no process of the attempt lives.
_GPU_SECONDS = 20.0


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
        trace: AttemptTrace,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._client = client
        self._wakeup = wakeup
        self._node_id = node_id
        self._record = record
        self._predecessor = predecessor
        self._trainer = trainer
        self._trace = trace

    def run(self) -> ExitStatus:
        if self._predecessor is not None:
            self._end_leftovers(self._predecessor)
        asked_at = time.time()
        claimed = claim_attempt(
            self._client,
            self._folder.attempt_id,
            node_id=self._node_id,
            nonce=self._record.nonce,
            patience=self._settings.supervisor.claim_patience_seconds,
            wakeup=self._wakeup,
            traceparent=self._trace.traceparent,
        )
        claim = claimed.claim
        if claim is None:
            return self._give_up(claimed)
        # For an attempt that came without its message.
        self._trace.begin(claim.traceparent)
        self._trace.part("claim request", asked_at)
        lease = Lease()
        lease.grant(claimed.sent_at, claim.lease_seconds, claim.lease_number)
        write_private(self._folder.claim, claim.model_dump(mode="json"))
        self._link = Link(
            self._client,
            self._folder,
            claim.fencing_token,
            lease=lease,
            interval=claim.heartbeat_interval_seconds,
            poke=self._wakeup.poke,
        )
        self._link.hear(claimed.sent_at, claim)
        self._secrets = JobSecrets(claim.spec)
        self._spool = Spool(
            self._folder.spool, damaged=self._folder.damaged, mask=self._secrets.mask_json
        )
        try:
            return self._supervise(claim)
        finally:
            self._link.close()
            self._spool.close()

    def _supervise(self, claim: Claim) -> ExitStatus:
        shipper = Shipper(self._spool, self._link)
        uploads = Uploads(
            self._folder,
            self._link,
            url=self._settings.artifact_url,
            prefix=claim.artifact_prefix,
            keep=int((claim.spec.get("checkpoint") or {}).get("keep_last", 3)),
        )
        collector = Collector(
            self._spool,
            telemetry=self._folder.work / "telemetry.jsonl",
            logs={"stdout": self._folder.stdout, "stderr": self._folder.stderr},
        )
        devices = DeviceMetrics(self._settings.node_metrics_file, claim.gpu_indices)
        intake = Intake(
            collector,
            self._spool,
            shipper,
            uploads,
            self._link,
            self._wakeup,
            devices,
            self._trace,
        )
        self._link.start()
        shipper.start()
        uploads.start()
        verdict: Verdict | None
        if self._trainer is None:
            verdict = self._verdict_on_predecessor(intake)
        else:
            verdict = self._train(claim, self._trainer, intake)
        if verdict is None:
            self._end_all(grace=0.0)
            self._link.end_of_training()
            return disowned(self._folder)
        closing = Closing(
            self._settings.supervisor,
            self._folder,
            self._link,
            self._spool,
            shipper,
            uploads,
            self._wakeup,
            self._secrets,
        )
        return closing.close(verdict)

    def _give_up(self, claimed: Claimed) -> ExitStatus:
        """No claim. An attempt that is certainly not this node's and never began here leaves
        nothing. One that may be, by a claim of a predecessor or one without an answer, stays for
        a successor: nobody else could claim it, so it would last until its lease ends."""
        self._end_all(grace=0.0)
        began = self._folder.started.exists()
        if claimed.disowned and began:
            return disowned(self._folder)
        if not claimed.disowned and (began or claimed.unsure or self._predecessor is not None):
            return ExitStatus.LEFT_FOR_SUCCESSOR
        self._folder.remove()
        return ExitStatus.NOT_OURS

    def _train(self, claim: Claim, trainer: Trainer, intake: Intake) -> Verdict | None:
        """Watches the trainer to its end; None when the attempt was disowned."""
        preparation = Preparation(
            self._folder, claim, self._settings, self._link, self._wakeup.poke, self._trace
        )
        preparation.start()
        memory = OomCounts.now()
        gpus = GpuMemory(claim.gpu_indices if claim.device == "cuda" else ())
        limits = claim.spec.get("limits") or {}
        stopping = Stopping(
            self._link,
            self._wakeup,
            self._settings.supervisor,
            patience=float(limits.get("cancel_deadline_seconds", 120)),
        )
        logs = [self._folder.stdout, self._folder.stderr]
        sinks = claim.spec.get("telemetry") or {}
        telemetry = TelemetryFile(self._folder, [kind for kind in SINKS if sinks.get(kind)])
        killed = False
        while True:
            self._wakeup.wait(_TICK_SECONDS)
            trainer.reap()
            intake.round()
            bound_logs(logs, self._settings.supervisor.log_bytes)
            telemetry.shorten(self._spool.position("telemetry"))
            if self._link.stale is not None:
                return None
            if preparation.verdict is not None and stopping.cause is None:
                self._end_all(grace=0.0)
                return preparation.verdict
            if trainer.status is None:
                match stopping.decide():
                    case StopStep.ASK:
                        # One that has not begun has nothing to save.
                        trainer.send(signal.SIGTERM if trainer.begun else signal.SIGKILL)
                    case StopStep.END:
                        killed = trainer.begun
                        self._end_all(grace=stopping.grace)
            if trainer.status is not None:
                break
            if preparation.done and not trainer.begun and stopping.cause is None:
                self._begin(trainer, claim)
        self._end_all(grace=self._settings.supervisor.leftover_grace_seconds)
        held = gpus.wait_until_free(_GPU_SECONDS)
        if held is not None:
            self._link.note("gpu_memory_held", f"no process of the attempt lives, but {held}")
        free = shutil.disk_usage(self._folder.work).free
        self._link.end_of_training()
        self._folder.release_reserve()
        intake.drain()
        if self._link.stale is not None:
            return None
        return classify(
            Ending(
                result=read_object(self._folder.work / "result.json"),
                status=trainer.status,
                cause=stopping.cause,
                cause_reason=stopping.reason,
                killed=killed,
                host_out_of_memory=OomCounts.now().grew_since(memory),
                step=intake.step,
                log_tail=last_lines(logs, _LOG_TAIL_LINES),
                crash_log=last_lines([self._folder.work / "crash.log"], _LOG_TAIL_LINES),
                free_bytes=free,
            )
        )

    def _begin(self, trainer: Trainer, claim: Claim) -> None:
        write_private(self._folder.started, {"time": time.time()})
        order = trainer_order(self._folder, claim, self._settings, self._trace.traceparent)
        self._trace.ordered()
        trainer.begin(order)
        logger.info("trainer %d began attempt %s", trainer.pid, self._folder.attempt_id)

    def _verdict_on_predecessor(self, intake: Intake) -> Verdict:
        """The supervisor that ran this attempt is gone: what it left is collected and judged."""
        self._link.end_of_training()
        self._link.note(
            "supervisor_lost", "the attempt's supervisor died; the node closes the attempt"
        )
        intake.drain()
        for records in TelemetryFile(self._folder).records():
            intake.take(records)
        earlier = Verdict.from_json(read_object(self._folder.outcome))
        if earlier is not None:
            return earlier
        result = read_object(self._folder.work / "result.json")
        # Who was ended by its node's shutdown was not lost.
        cause = StopCause.SHUTDOWN if self._folder.shutdown.exists() else None
        return classify(Ending(result=result, status=None, step=intake.step, cause=cause))

    def _end_leftovers(self, predecessor: SupervisorRecord) -> None:
        """Processes of a dead supervisor's trainer are found by what their environment says."""
        ended = end_processes(
            lambda: with_environment(MARKER, predecessor.marker), grace=0.0, patience=60.0
        )
        if not ended:
            logger.error("processes of attempt %s cannot be killed", self._folder.attempt_id)

    def _end_all(self, *, grace: float) -> None:
        """Returns when no descendant of this process lives, however long that takes."""
        trainer = self._trainer

        def reap() -> None:
            if trainer is not None:
                trainer.reap()

        me = os.getpid()
        end_processes(lambda: descendants(me), grace=grace, patience=math.inf, reap=reap)
        reap()
